"""When a service's threads are pinned to their cores, and when they are unpinned."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hotcold.placement.machine.core_affinity import CoreAffinity, Delays

CORES = sorted(os.sched_getaffinity(0))
GOOD, BAD = 0.1, 0.6  # shares of a request's time that are lost


class Machine:
    """A `CoreAffinity`, its clock, and the service's counters."""

    def __init__(self, cores: list[int]) -> None:
        self.now = 0.0
        self.counted = [0, 0, 0]
        self.affinity = CoreAffinity(cores, clock=lambda: self.now)

    def work(self, seconds: float, share: float, request_us: int = 1000) -> bool:
        """Serve requests, polled twice a second; whether threads are pinned afterwards."""
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            num_requests = 500_000 // request_us
            delayed = int(share * request_us) * num_requests
            added = (delayed, request_us * num_requests, num_requests)
            self.counted = [old + new for old, new in zip(self.counted, added, strict=True)]
            self.affinity.poll(Delays(*self.counted))
        return self.affinity.is_pinned


def test_threads_are_unpinned_for_a_while_where_another_program_wants_their_cores() -> None:
    machine, left_out = Machine(CORES), list[int]()
    machine.affinity.leave_out = left_out.append
    assert machine.work(60, GOOD) and left_out == []
    assert not machine.work(0.5, BAD) and left_out == [1]
    assert not machine.work(1, GOOD)
    assert machine.work(1.5, GOOD) and left_out == [1, 0]


def test_the_pauses_grow_while_trouble_stays_and_begin_anew_after_it() -> None:
    machine, pauses, unpinned = Machine(CORES), [], None
    for _ in range(2 * 600):
        was = machine.affinity.is_pinned
        machine.work(0.5, BAD)
        if was and not machine.affinity.is_pinned:
            unpinned = machine.now
        if not was and machine.affinity.is_pinned:
            assert unpinned is not None
            pauses.append(machine.now - unpinned)
    assert pauses[:3] == [2, 4, 8] and pauses[-1] == 128 == max(pauses)
    machine.work(300, GOOD)
    assert not machine.work(0.5, BAD)
    assert machine.work(2, BAD)  # the first pause again


@pytest.mark.parametrize(
    ("share", "request_us"),
    [(0.5, 100), (0.3, 5000)],  # a small model: waking takes long; a large one: uneven cores
)
def test_what_is_small_in_itself_or_beside_the_work_is_no_trouble(
    share: float, request_us: int
) -> None:
    assert Machine(CORES).work(10, share, request_us)


@contextmanager
def waiting_thread(affinity: CoreAffinity, thread: int) -> Iterator[int]:
    """A thread of this process that is pinned; its id."""
    pinned, ends, ids = threading.Event(), threading.Event(), []

    def run() -> None:
        ids.append(threading.get_native_id())
        affinity.pin(thread)
        pinned.set()
        ends.wait()
        affinity.unpin(thread)
        ids.append(os.sched_getaffinity(0) == set(CORES))

    worker = threading.Thread(target=run)
    worker.start()
    pinned.wait()
    try:
        yield ids[0]
    finally:
        ends.set()
        worker.join()
        assert ids[1]  # it may go anywhere again


@pytest.mark.skipif(len(CORES) < 2, reason="a thread on one core of several")
def test_the_operating_system_pins_threads() -> None:
    machine = Machine(CORES[:2])
    with (
        waiting_thread(machine.affinity, 0) as first,
        waiting_thread(machine.affinity, 1) as second,
    ):
        assert os.sched_getaffinity(first) == {CORES[0]}
        assert os.sched_getaffinity(second) == {CORES[1]}
        machine.work(0.5, BAD)
        assert os.sched_getaffinity(first) == os.sched_getaffinity(second) == set(CORES)
        with waiting_thread(machine.affinity, 1) as third:  # in the second one's place, meanwhile
            assert os.sched_getaffinity(third) == set(CORES)
            machine.work(3, GOOD)
            assert os.sched_getaffinity(first) == {CORES[0]}
            assert os.sched_getaffinity(third) == {CORES[1]}


def test_counters_that_begin_anew_are_no_trouble() -> None:
    machine = Machine(CORES)
    assert machine.work(10, GOOD)
    machine.counted = [0, 0, 0]
    assert machine.work(10, GOOD)
    assert not machine.work(0.5, BAD)
