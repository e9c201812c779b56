"""Threads go through phases side by side, meet after each, and stop where one of them fails."""

from __future__ import annotations

import threading

import pytest

from hotcold.actors.cpu.thread_team import Shared, ThreadTeam
from hotcold.numba_kernels.decode.rows import split_range


def test_no_phase_begins_before_all_have_ended_the_last() -> None:
    team, num_threads, num_phases = ThreadTeam(3, lambda thread: None), 3, 40
    counts, seen, lock = [0] * num_phases, [], threading.Lock()

    def phase(number: int, thread: int) -> None:
        with lock:
            counts[number] += 1
            if number:
                seen.append(counts[number - 1])

    for _ in range(5):
        counts[:], seen[:] = [0] * num_phases, []
        team.run([lambda thread, at=at: phase(at, thread) for at in range(num_phases)])  # type: ignore[misc]
        assert counts == [num_threads] * num_phases
        assert set(seen) == {num_threads}
    team.close()


def test_a_failing_phase_is_told_and_the_team_goes_on() -> None:
    team, done = ThreadTeam(3, lambda thread: None), list[int]()

    def fail(thread: int) -> None:
        if thread == 1:
            raise ValueError("of thread 1")

    for _ in range(3):
        with pytest.raises(ValueError, match="of thread 1"):
            team.run([lambda thread: None, fail, done.append])
    assert done == []
    team.run([done.append, done.append])
    assert sorted(done) == [0, 0, 1, 1, 2, 2]
    team.close()
    with pytest.raises(RuntimeError):
        team.run([done.append])


@pytest.mark.parametrize("num_products", [0, 1 << 28, 1 << 40])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_all_of_a_shared_phase_is_done_once(num_threads: int, num_products: int) -> None:
    """By any thread; parts of several sizes meet without gaps in rows of any number."""
    team, lock = ThreadTeam(num_threads, lambda thread: None), threading.Lock()
    for length, unit in ((1, 1), (97, 1), (5504, 16), (640, 64)):
        rows: list[int] = []

        def compute(thread: int, part: int, count: int, length: int = length) -> None:
            with lock:
                rows.extend(range(*split_range(length, part, count, unit)))  # noqa: B023

        team.run([Shared(num_threads, num_products, compute)])
        assert sorted(rows) == list(range(length))
    team.close()
