"""Services that do not answer: which of them are lost, and what is said of it."""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from hotcold.actors.exchange import service_process
from hotcold.actors.exchange.service_process import ServiceProcess
from hotcold.actors.exchange.watch import ActorWatch
from hotcold.actors.protocol.failures import ServiceLost, is_killed_for_memory

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


@pytest.mark.parametrize("who", ["kernel", "ray", "nobody"])
def test_a_loss_for_want_of_memory_is_told_as_such(
    who: str, watch: ActorWatch, child: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = service_process._num_oom_kills()
    killed = [child.pid] if who == "ray" else []
    monkeypatch.setattr(service_process, "killed_by_ray", lambda pid: pid in killed)
    monkeypatch.setattr(service_process, "_num_oom_kills", lambda: before + (who == "kernel"))
    child.kill()
    psutil.wait_procs([child])
    with pytest.raises(ServiceLost, match="the cpu0 service") as found:
        watch.check([0], 0)
    assert is_killed_for_memory(str(found.value)) == (who != "nobody")


@pytest.mark.parametrize(("looks_since", "is_meant"), [(0, True), (1, True), (2, False)])
def test_whom_the_kernel_killed_long_ago_says_nothing_of_a_service(
    looks_since: int, is_meant: bool, child: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, now = [5], [0.0]
    monkeypatch.setattr(service_process, "killed_by_ray", lambda pid: False)
    monkeypatch.setattr(service_process, "_num_oom_kills", lambda: count[0])
    monkeypatch.setattr(service_process.time, "monotonic", lambda: now[0])
    process = ServiceProcess(child.pid, is_local=True)
    count[0] += 1
    for _ in range(looks_since):
        now[0] += 5
        process.note_kills()
    monkeypatch.undo()
    monkeypatch.setattr(service_process, "killed_by_ray", lambda pid: False)
    monkeypatch.setattr(service_process, "_num_oom_kills", lambda: count[0])
    child.kill()
    psutil.wait_procs([child])
    assert process.is_gone() and is_killed_for_memory(process.how_it_ended()) == is_meant
