"""Services that fail, die or hang: what is noticed and told, on one host and on several."""

from __future__ import annotations

import pickle
import queue
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from hotcold.actors.attention.attention_service import AttentionService
from hotcold.actors.cpu.cpu_service import CpuService
from hotcold.actors.exchange import service_process
from hotcold.actors.exchange.call_exchange import CallExchange, ServiceReply
from hotcold.actors.exchange.doorbell_exchange import ArenaExchange
from hotcold.actors.exchange.pulse import Pulse
from hotcold.actors.exchange.service import Service
from hotcold.actors.exchange.service_process import ServiceProcess
from hotcold.actors.faults.replacement import OwnPlace
from hotcold.actors.faults.watch import ActorWatch
from hotcold.actors.processes.relay_actor import RelayActor
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.failures import (
    AnswerFailed,
    RequestError,
    ServiceLost,
    is_killed_for_memory,
)
from hotcold.model.errors import HotcoldError, ServiceError
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL
from hotcold.numba_kernels.loops.mailbox import (
    DONE,
    NUM_REPLY_WORDS,
    OPERATION,
    PING,
    REQUEST,
    STOP,
    SharedBuffers,
    cell,
)
from tests.actors.in_process import InProcessSystem
from tests.tiny_checkpoint import Tiny


@pytest.mark.parametrize(("service", "copying"), [(AttentionService, False), (CpuService, True)])
def test_a_thread_that_fails_is_named(
    tiny: Tiny,
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
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
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
    monkeypatch.setattr("hotcold.actors.faults.watch._LONGEST_REQUEST_POLLS", 500)
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
def test_the_affinity_thread_sees_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
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


POLLS = 500  # ten times those of a silent service


@pytest.fixture
def child() -> Iterator[psutil.Process]:
    """A process that stands in for a service's."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield psutil.Process(process.pid)
        process.kill()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, child: psutil.Process) -> ActorWatch:
    """Of one service in `child`, which leaves all pings unanswered."""
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: ([], refs))

    def get(ref: Any, timeout: float) -> None:
        raise ray.exceptions.GetTimeoutError()

    monkeypatch.setattr(ray, "get", get)
    watch = ActorWatch(["cpu0"], [SimpleNamespace(ping=SimpleNamespace(remote=object))])
    watch.expect(0, ServiceProcess(child.pid, is_local=True))
    watch.has_started = True
    return watch


Stat = Callable[[int], tuple[str, int]]


def stat_of(*states: tuple[str, int]) -> Stat:
    """A process's states, poll after poll; the last for ever."""
    left = list(states)
    return lambda pid: left.pop(0) if len(left) > 1 else left[0]


def test_a_service_that_swaps_is_slow_not_lost(
    watch: ActorWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = [("S", n) for n in range(POLLS)]
    waiting = [("D", POLLS)] * POLLS
    stat = stat_of(*reading, *waiting, ("S", POLLS))
    monkeypatch.setattr(service_process, "_state_and_major_faults", stat)
    for _ in range(2 * POLLS):
        watch.check([0], 0)
    with pytest.raises(ServiceLost, match="the cpu0 service does not answer"):
        for _ in range(POLLS):
            watch.check([0], 0)


def test_all_that_are_lost_at_a_poll_are_told(watch: ActorWatch, child: psutil.Process) -> None:
    handle = SimpleNamespace(ping=SimpleNamespace(remote=object))
    watch = ActorWatch(["gpu", "cpu0", "cpu1"], 3 * [handle])
    watch.has_started = True
    gone = subprocess.Popen(["true"])
    gone.wait()
    for service, pid in enumerate((gone.pid, child.pid, gone.pid)):
        watch.expect(service, ServiceProcess(pid, is_local=True))
    with pytest.raises(ServiceLost) as caught:
        watch.check([0, 1, 2], 1)
    assert caught.value.causes == {0: "the gpu service died", 2: "the cpu1 service died"}
    again = pickle.loads(pickle.dumps(caught.value))  # as it comes from another host
    assert again.causes == caught.value.causes and str(again) == str(caught.value)


def test_a_ping_from_another_process_is_a_loss(
    watch: ActorWatch, child: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray has put it in the place of the one that loaded the service."""
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs, []))
    monkeypatch.setattr(ray, "get", lambda ref, timeout: child.pid)
    watch.check([0], 0)
    monkeypatch.setattr(ray, "get", lambda ref, timeout: child.pid + 1)
    with pytest.raises(ServiceLost, match="the cpu0 service died"):
        watch.check([0], 0)


@pytest.mark.parametrize(
    ("who", "looks_since", "is_meant"),
    [
        ("kernel", 0, True),
        ("kernel", 1, True),
        ("kernel", 2, False),
        ("ray", 0, True),
        ("nobody", 0, False),
    ],
)
def test_a_loss_for_want_of_memory_is_told_as_such(
    who: str,
    looks_since: int,
    is_meant: bool,
    watch: ActorWatch,
    child: psutil.Process,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whom the kernel killed long ago says nothing of a service."""
    count, now = [5], [0.0]
    monkeypatch.setattr(service_process, "killed_by_ray", lambda pid: who == "ray")
    monkeypatch.setattr(service_process, "_num_oom_kills", lambda: count[0])
    with monkeypatch.context() as patch:
        patch.setattr(service_process.time, "monotonic", lambda: now[0])
        process = ServiceProcess(child.pid, is_local=True)
        count[0] += who == "kernel"
        for _ in range(looks_since):
            now[0] += 5
            process.note_kills()
    watch.expect(0, process)
    child.kill()
    psutil.wait_procs([child])
    with pytest.raises(ServiceLost, match="the cpu0 service") as found:
        watch.check([0], 0)
    assert is_killed_for_memory(str(found.value)) == is_meant


LAYOUT = ArenaLayout(4, 8, 16, 32, 50, 8, 1, 1)


def new_buffers() -> SharedBuffers:
    return LAYOUT.buffers(LAYOUT.new_arena())


class Local:
    """Stands in for the arena's exchange."""

    def __init__(self, failure: HotcoldError | None) -> None:
        self.buffers, self.next_number = new_buffers(), 1
        self.failure = failure
        self.requested: list[int] = []

    def request(self, services: Sequence[int]) -> int:
        self.requested += services
        if self.failure is not None:
            raise self.failure
        return 1


@dataclass
class Far:
    """Stands in for a relay: replies BUSY_NS 7, or fails, when its result is fetched."""

    services: tuple[int, ...]
    failure: HotcoldError | None = None
    fetched: list[Any] = field(default_factory=list)

    def ask(self, requests: dict[int, Any]) -> dict[int, Any]:
        return requests

    def result(self, requests: dict[int, Any]) -> dict[int, ServiceReply]:
        self.fetched += requests
        if self.failure is not None:
            raise pickle.loads(pickle.dumps(self.failure))  # as it comes from another process
        return {service: ServiceReply(np.full(NUM_REPLY_WORDS, 7), {}) for service in requests}


def request_all(local: Local, *relays: Far) -> CallExchange:
    exchange = CallExchange(local.buffers, relays, local)  # type: ignore[arg-type]
    exchange.buffers.requests[:, OPERATION] = PING
    exchange.request([1, 2, 3])
    return exchange


LOST = ServiceLost(2, "the cpu1 service died; start again")
FAILED = AnswerFailed(3, "the cpu2 service failed: MemoryError: no room")


@pytest.mark.parametrize(
    ("near", "far", "farthest", "raised"),
    [
        (ServiceLost(1, "x"), None, None, (ServiceLost, 1)),
        (None, LOST, None, (ServiceLost, 2)),
        (None, LOST, FAILED, (ServiceLost, 2)),
        (None, FAILED, LOST, (ServiceLost, 2)),
        (ServiceLost(1, "x"), LOST, None, (ServiceLost, 1)),
        (AnswerFailed(1, "x"), LOST, None, (ServiceLost, 2)),
        (AnswerFailed(1, "x"), None, FAILED, (AnswerFailed, 1)),
        (None, None, FAILED, (AnswerFailed, 3)),
    ],
)
def test_the_lost_service_is_raised_when_no_service_works_any_more(
    near: HotcoldError | None,
    far: HotcoldError | None,
    farthest: HotcoldError | None,
    raised: tuple[type[Any], int],
) -> None:
    relays = Far((2,), far), Far((3,), farthest)
    with pytest.raises((RequestError, ServiceLost)) as caught:
        request_all(Local(near), *relays)
    error: Any = caught.value
    assert (type(error), error.service) == raised
    lost = [each for each in (near, far, farthest) if isinstance(each, ServiceLost)]
    assert list(error.causes) == [each.service for each in lost] or not lost
    assert [relay.fetched for relay in relays] == [[2], [3]]


def test_a_lost_relay_names_no_service() -> None:
    """Nobody could be put in its place: what is raised is not a ServiceLost."""
    with pytest.raises(ServiceError, match="the relay on x died") as caught:
        request_all(Local(None), Far((2, 3), ServiceError("the relay on x died")))
    assert not isinstance(caught.value, ServiceLost)


def request_and_done(buffers: SharedBuffers, service: int) -> list[int]:
    cells = cell(service, REQUEST), cell(service, DONE)
    return [int(buffers.cells[index * INTS_A_CELL]) for index in cells]


@pytest.mark.parametrize("is_far", [False, True])
def test_a_place_ends_the_old_process_and_withdraws_its_request(
    is_far: bool, child: psutil.Process
) -> None:
    """One that was only stopped, too."""
    child.suspend()
    buffers = new_buffers()
    for service in (1, 2):
        buffers.cells[cell(service, REQUEST) * INTS_A_CELL] = 5
        buffers.cells[cell(service, DONE) * INTS_A_CELL] = 4
    if is_far:
        handle = SimpleNamespace(ping=SimpleNamespace(remote=lambda: None))
        relay = RelayActor(["gpu", "cpu0", "cpu1", "cpu2"], [handle] * 4)
        relay._exchange = ArenaExchange(buffers, relay._watch)
        relay.expect(2, child.pid)
        relay.end(2)
        with pytest.raises(ServiceLost, match="the cpu1 service died") as caught:
            relay._watch.check([2], 0)
        assert caught.value.service == 2
    else:
        place, process = OwnPlace([], buffers), ServiceProcess(child.pid, is_local=True)
        assert place.end(2, process)
        place.expect(2, process)
    assert not psutil.pid_exists(child.pid)
    assert request_and_done(buffers, 2) == [0, 0]
    assert request_and_done(buffers, 1) == [5, 4]


def test_a_process_of_another_host_is_not_ended_from_here(child: psutil.Process) -> None:
    """Its number may be that of some other process here."""
    place = OwnPlace([], None)
    assert not place.end(1, ServiceProcess(child.pid, is_local=False))
    assert child.is_running()
