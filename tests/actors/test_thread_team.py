"""Threads go through phases side by side, meet after each, and stop where one of them fails."""

from __future__ import annotations

import threading

import pytest

from hotcold.actors.cpu.thread_team import ThreadTeam


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


def test_each_thread_begins_once_and_has_its_own_number() -> None:
    begun: list[int] = []
    team = ThreadTeam(2, begun.append)
    found: dict[int, set[int]] = {0: set(), 1: set()}
    for _ in range(3):
        team.run([lambda thread: found[thread].add(threading.get_ident())])
    assert sorted(begun) == [0, 1]
    assert all(len(idents) == 1 for idents in found.values())
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
