"""Stop strings, the dealing of neurons, the arena, and a service whose thread fails."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotcold.actors.attention.attention_service import AttentionService
from hotcold.actors.cpu.cpu_service import CpuService
from hotcold.actors.driver.outputs import StopStrings
from hotcold.actors.exchange.doorbell_exchange import ArenaExchange
from hotcold.actors.exchange.service import Service
from hotcold.actors.exchange.watch import ActorWatch, Pulse
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.failures import RequestError, ServiceLost
from hotcold.model.errors import ServiceError
from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL
from hotcold.numba_kernels.serve.mailbox import (
    DONE,
    OPERATION,
    REQUEST,
    STOP,
    cell,
)
from tests.actors.in_process import InProcessSystem
from tests.conftest import TinyCheckpoint

_TEXTS = st.text("ab\n", max_size=6)
_STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


def cut(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    """The text up to the first stop string, searched in all the text after every piece."""
    text = ""
    for piece in pieces:
        text += piece
        places = [text.find(stop) for stop in stops if stop in text]
        if places:
            return text[: min(places)], True
    return text, False


@given(st.lists(_TEXTS, max_size=12), _STOPS)
def test_stop_strings(pieces: list[str], stops: list[str]) -> None:
    expected, found = cut(pieces, stops)
    machine, shown, received = StopStrings(stops), "", ""
    for piece in pieces:
        shown += machine.push(piece)
        received += piece
        if not machine.found:
            held = received[len(shown) :]
            assert received.startswith(shown)
            assert not held or any(stop.startswith(held) for stop in stops)
    shown += machine.flush()
    assert (shown, machine.found) == (expected, found)
    assert machine.text == shown
    assert machine.push("more") == ("" if found else "more")


@given(st.lists(_TEXTS, max_size=12), _STOPS, st.integers(0, 12))
def test_stop_strings_that_are_shown_or_not_looked_for_yet(
    pieces: list[str], stops: list[str], first: int
) -> None:
    machine, silent, received = StopStrings(stops, includes=True), "".join(pieces[:first]), ""
    for number, piece in enumerate(pieces):
        if not machine.found:
            received += piece
        machine.push(piece, may_stop=number >= first)
    machine.flush()
    expected, found = cut(pieces[first:], stops)
    shown = silent + expected
    ends = [stop for stop in stops if received.startswith(shown + stop)]
    assert machine.found == found
    assert machine.text == shown + (min(ends, key=len) if found else "")


@pytest.mark.parametrize(("service", "copying"), [(AttentionService, False), (CpuService, True)])
def test_a_thread_that_fails_is_named(
    tiny: Callable[..., TinyCheckpoint],
    service: type[Service],
    copying: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a kernel cannot be compiled: no thread answers, and the driver must not wait on."""

    def fail(self: Service, thread: int, seen: int) -> int:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(service, "serve", fail)
    system = InProcessSystem(tiny("llama-relu").path, copying=copying)
    name = "gpu" if service is AttentionService else "cpu0"
    with pytest.raises(ServiceError, match=rf"the {name} service failed: .*no such instruction"):
        system.logits("exact", tiny("llama-relu").ids, [1])
    assert system.watch.num_polls < 5
    monkeypatch.undo()
    if service is CpuService:  # the other one can still be stopped
        system.exchange.buffers.requests[0, OPERATION] = STOP
        system.exchange.request([0])
        assert system.services[0].join(60)


def test_a_service_that_cannot_release_still_ends(
    tiny: Callable[..., TinyCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Service) -> None:
        raise RuntimeError("still in use")

    monkeypatch.setattr(CpuService, "release", fail)
    system = InProcessSystem(tiny("llama-relu").path, num_threads=2)
    with pytest.raises(RequestError, match="the cpu0 service failed: RuntimeError: still in use"):
        system.stop()
    assert all(service.join(60) for service in system.services)


def test_a_frozen_machine_loses_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour passes between two polls; the service answers after the third."""
    layout = ArenaLayout(1, 1, 4, 4, 4, 1, 1, 1)
    buffers = layout.buffers(layout.new_arena())
    hours = iter(range(0, 10**6, 3600))
    monkeypatch.setattr("hotcold.actors.exchange.doorbell_exchange.POLL_NS", 100_000)
    monkeypatch.setattr("hotcold.actors.exchange.watch._LONGEST_REQUEST_POLLS", 500)
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(hours) * 10**9)
    watch = ActorWatch(["gpu"], [SimpleNamespace(ping=SimpleNamespace(remote=object))])
    exchange = ArenaExchange(buffers, watch)
    number, polls = exchange.next_number, []

    def poll(self: Pulse, max_polls: int, **options: bool) -> int:
        polls.append(max_polls)
        if len(polls) == 3:
            buffers.cells[cell(0, DONE) * INTS_A_CELL] = number
        return 1

    monkeypatch.setattr(Pulse, "poll", poll)
    exchange.request([0])
    assert len(polls) == 3
    with pytest.raises(ServiceLost, match=r"the gpu service has not answered for [0-9]+ s; start"):
        exchange.request([0])  # it answers pings, and never this
    assert 400 < len(polls) < 2000


@pytest.mark.timeout(60)
def test_the_affinity_thread_sees_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """STOP is rung between its reading of the end and its reading of the bell."""
    layout = ArenaLayout(1, 1, 4, 4, 4, 1, 1, 1)
    buffers, waits = layout.buffers(layout.new_arena()), queue.SimpleQueue[Callable[[], bool]]()
    affinity = SimpleNamespace(
        is_pinned=True, watch=lambda await_work, delays: waits.put(await_work)
    )
    service = CpuService.__new__(CpuService)
    service.index, service.buffers, service.source = 0, buffers, ()
    service._watch_affinity(affinity)  # type: ignore[arg-type]
    await_work, slept = waits.get(), []
    monkeypatch.setattr(
        "hotcold.actors.exchange.service.sleep_change",
        lambda *arguments: slept.append(arguments[2]),
    )
    assert await_work() and slept == [0]  # no request
    bells = [cell(0, kind) * INTS_A_CELL for kind in (REQUEST, DONE)]
    buffers.cells[bells[0]] = 5  # STOP, which has no reply yet
    assert await_work() and slept == [0]
    service._ended.set()
    buffers.cells[bells[1]] = 5
    assert not await_work() and slept == [0]
