"""Readers that stop, die or give up: their requests end, and nothing of others is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest

from hotcold.actors import system as system_file
from hotcold.actors.client import AsyncClient
from hotcold.actors.driver.driver import Driver
from hotcold.actors.driver.streams import (
    TIMEOUT_POLLS,
    Reader,
    Readers,
    Stream,
)
from hotcold.actors.protocol.failures import RequestError
from hotcold.actors.protocol.messages import GenerateRequest, ReaderEpoch, TokenEvent
from hotcold.actors.system import System
from hotcold.model.errors import ServiceError
from tests.actors.batching import Background, batching, greedy
from tests.actors.kept_system import wait_until
from tests.tiny_checkpoint import Tiny

CONTEXT = 50_000
READER = ReaderEpoch("a test")


def request_of(max_tokens: int, name: str = "") -> GenerateRequest:
    return greedy([1, 2, 3], max_tokens, name)


@pytest.fixture(scope="module")
def driver(tiny: Tiny) -> Iterator[Driver]:
    with batching(tiny("llama-relu"), context=CONTEXT, num_slots=2, kv_positions=2 * CONTEXT) as (
        _,
        running,
    ):
        yield running


def await_running(driver: Driver) -> None:
    """Return once a request runs."""
    while not driver.load().num_running:
        threading.Event().wait(0.01)


def await_idle(driver: Driver) -> None:
    """Return once nothing runs; all pages of the KV cache are free then."""

    def is_idle() -> bool:
        load = driver.load()
        return not (load.num_running or load.num_waiting or load.kv_cache_usage)

    assert wait_until(is_idle)


def test_events_are_handed_out_until_they_have_come() -> None:
    reader = Reader()
    stream = reader.open("a", lambda stream: None)
    assert reader.take(0, 0.0) == (0, [])
    stream.put(TokenEvent("one"))
    first = reader.take(0, 0.0)
    assert first == (1, [("a", TokenEvent("one"))]) == reader.take(0, 0.0)
    stream.put(error := ValueError("two"))
    assert reader.take(0, 0.0) == first
    assert reader.take(1, 0.0) == (2, [("a", error)])
    assert reader.take(2, 0.0) == (2, [])
    assert Reader().take(7, 0.0) == (7, [])  # of a driver that has forgotten this reader


def test_two_calls_at_once_get_the_same_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abandoned call takes nothing from the other; both end."""
    reader = Reader()
    others: list[Background] = []
    inside = threading.Semaphore(0)

    def take(wait_s: float) -> list[object]:
        inside.release()
        if not others:  # the other one comes now; it may not come in here
            others.append(Background(lambda: reader.take(0, 0.0)))
            inside.acquire()
            assert not inside.acquire(timeout=0.3)
        return [("a", TokenEvent("one"))]

    monkeypatch.setattr(reader, "next_events", take)
    first = reader.take(0, 0.0)
    assert first == (1, [("a", TokenEvent("one"))]) == others[0].end()


def open_stream(reader: Reader) -> Stream:
    return reader.open("a", lambda stream: None)


def test_a_new_epoch_ends_the_earlier_one() -> None:
    readers = Readers()
    stream = open_stream(readers.touch(READER))
    readers.touch(ReaderEpoch("another", 5))
    later = ReaderEpoch(READER.name, 1)
    assert not stream.cancelled.is_set()
    reader = readers.touch(later)
    assert stream.cancelled.is_set() and not reader.has_ended
    with pytest.raises(RequestError, match="ask again"):
        readers.touch(READER)
    readers.attend(READER)  # late, and without an answer
    assert readers.touch(later) is reader


def test_silent_readers_end_and_idle_ones_are_forgotten() -> None:
    readers = Readers()
    streams = [open_stream(readers.touch(ReaderEpoch(name))) for name in ("silent", "heard")]
    idle = readers.touch(ReaderEpoch("idle"))
    for _ in range(TIMEOUT_POLLS):
        assert not streams[0].cancelled.is_set()
        readers.touch(ReaderEpoch("heard"))
        readers.poll()
    assert [stream.cancelled.is_set() for stream in streams] == [True, False]
    assert readers.touch(ReaderEpoch("idle")) is not idle
    with pytest.raises(RequestError, match="nobody read"):  # it was only stopped, and runs on
        readers.touch(ReaderEpoch("silent"))
    assert readers._readers.keys() == {"heard", "idle"}  # nothing is kept of it, but its name
    reader = readers.touch(ReaderEpoch("silent", 1))
    with pytest.raises(RequestError, match="nobody read"):
        readers.touch(ReaderEpoch("silent"))
    reader.end()
    assert open_stream(reader).cancelled.is_set()


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_killed_reader_leaves_nothing_running(driver: Driver, is_stream: bool) -> None:
    """As `kill -9` leaves it: it calls no more, and closes nothing."""
    name = f"endless {is_stream}"
    request = request_of(CONTEXT - 10, name)
    if is_stream:
        stream = Background(lambda: list(driver.generate(request, is_attended=True)))
    else:
        driver.submit(ReaderEpoch(name), request)
    await_running(driver)
    for _ in range(TIMEOUT_POLLS):
        driver.readers.poll()
    await_idle(driver)
    assert name not in driver.readers._readers
    if is_stream:  # what ran for it ends too
        result = stream.end()[-1].result
        assert result is not None and result.finish_reason == "cancelled"


class Stallable:
    """A running system as `AsyncClient` sees it: a driver that can be stopped for a while."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.may_answer = threading.Event()
        self.may_answer.set()

    def begin(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        owner = self._driver.readers if method == "attend" else self._driver
        called = getattr(owner, method)

        def call() -> Any:
            self.may_answer.wait()
            return called(*arguments)

        return asyncio.get_running_loop().run_in_executor(None, call)

    def cancel(self, request_id: str) -> None:
        self._driver.cancel(request_id)


def test_a_driver_that_stalls_and_recovers_runs_nothing_that_nobody_reads(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotcold.actors.client._TIMEOUT_POLLS", 5)
    monkeypatch.setattr("hotcold.actors.client.POLL_S", 0.2)
    monkeypatch.setattr("hotcold.actors.client._WAIT_S", 0.1)
    stallable = Stallable(driver)

    async def run() -> None:
        client = AsyncClient(stallable)  # type: ignore[arg-type]
        events: asyncio.Queue[Any] = asyncio.Queue()
        await client.submit(request_of(CONTEXT - 10), events.put_nowait)
        await asyncio.to_thread(await_running, driver)
        stallable.may_answer.clear()
        while isinstance(error := await events.get(), TokenEvent):
            assert error.result is None
        assert isinstance(error, ServiceError) and "does not answer" in str(error)
        assert driver.load().num_running == 1
        stallable.may_answer.set()
        await asyncio.to_thread(await_idle, driver)
        await client.submit(request_of(20), events.put_nowait)
        event = await events.get()
        while event.result is None:
            event += await events.get()
        assert event.num_tokens == 20 == len(event.result.ids)

    asyncio.run(asyncio.wait_for(run(), 150))


def test_a_request_that_was_cancelled_leaves_nothing_to_be_read(driver: Driver) -> None:
    """The next one may come minutes later."""

    async def run() -> None:
        client = AsyncClient(Stallable(driver))  # type: ignore[arg-type]
        await client.submit(request_of(20_000, "left"), lambda event: client.cancel("left"))
        while client._taking is None or not client._taking.done():
            await asyncio.sleep(0.01)
        await asyncio.to_thread(await_idle, driver)
        for _ in range(TIMEOUT_POLLS):
            driver.readers.poll()
        events: asyncio.Queue[Any] = asyncio.Queue()
        await client.submit(request_of(1), events.put_nowait)
        assert (await events.get()).result.ids

    asyncio.run(asyncio.wait_for(run(), 150))


CALL = ContextVar("CALL", default="")  # within which something is asked, as Ray knows it


def test_what_all_wait_for_is_begun_within_nobodys_call() -> None:
    """Ray cancels what a cancelled call has begun: the tokens of others must not be among it."""
    begun: dict[str, str] = {}

    def begin(method: str, *_: Any) -> asyncio.Future[Any]:
        begun[method] = CALL.get()
        return asyncio.get_running_loop().create_future()

    async def run() -> None:
        CALL.set("one client's")
        client = AsyncClient(SimpleNamespace(begin=begin))  # type: ignore[arg-type]
        submitting = asyncio.create_task(client.submit(request_of(1), lambda event: None))
        while "take_events" not in begun:
            await asyncio.sleep(0)
        submitting.cancel()

    asyncio.run(run())
    assert begun == {"submit": "one client's", "take_events": ""}


class Handle:
    """Stands in for the driver's actor; remembers what was called, and in which group."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, tuple[Any, ...]]] = []
        self.has_called = threading.Event()

    def __getattr__(self, method: str) -> Any:
        def remote(group: str) -> Callable[..., None]:
            return lambda *arguments: self._called(method, group, arguments)

        grouped = lambda concurrency_group: SimpleNamespace(remote=remote(concurrency_group))  # noqa: E731
        return SimpleNamespace(remote=remote(""), options=grouped)

    def _called(self, method: str, group: str, arguments: tuple[Any, ...]) -> None:
        self.calls.append((method, group, arguments))
        self.has_called.set()


def test_a_stream_is_attended_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_file, "_ATTEND_S", 0.01)
    handle = Handle()
    running = System(handle, owned=False)
    with running._attending("a"):
        assert handle.has_called.wait(100)
    assert handle.calls[0] == ("attend", "control", (ReaderEpoch("a"),))
