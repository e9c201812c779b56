"""A service's last threads are left out and come back between requests: bits stay the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL, SLEEPERS
from hotcold.numba_kernels.loops.mailbox import ENDED, TEAM, WANTED, cell_index
from tests.actors.in_process import InProcessSystem
from tests.quantized_models import make_model
from tests.tiny_checkpoint import Tiny

IDS = np.random.default_rng(5).integers(3, 60, 44)
NUM_THREADS = 3


def cells_of(system: InProcessSystem) -> list[np.ndarray]:
    """The TEAM cell of each service."""
    cells = system.exchange.buffers.cells
    places = [cell_index(s, TEAM) * INTS_A_CELL for s in range(len(system.services))]
    return [cells[place : place + INTS_A_CELL] for place in places]


def want(system: InProcessSystem, count: int) -> None:
    for cell in cells_of(system):
        cell[WANTED] = count


def all_logits(system: InProcessSystem) -> list[np.ndarray]:
    """Token by token, several at once, and a prompt that Python answers."""
    return [
        system.logits(mode, IDS, sizes)
        for mode in ("dense", "exact")
        for sizes in ([1] * 9, [7, 3], [40, 1, 1])
    ]


def require_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@contextmanager
def changing(system: InProcessSystem) -> Iterator[None]:
    """Another thread says all the time how many are to be left out."""
    ended, counts = threading.Event(), np.random.default_rng(7).integers(0, NUM_THREADS, 1000)

    def change() -> None:
        for turn in range(10**9):
            want(system, int(counts[turn % counts.size]))
            if ended.wait(0.0003):
                return

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("q-llama", "q4"), ("qwen3-moe", "")],
)
def test_logits_are_the_same(tiny: Tiny, tmp_path: Path, name: str, dtype: str) -> None:
    path = make_model(name, tmp_path / "model") if dtype else tiny(name).path
    with InProcessSystem(path, num_threads=NUM_THREADS, weight_dtype=dtype) as system:
        expected = all_logits(system)
        for count in (2, 1, 0):
            want(system, count)
            require_same(all_logits(system), expected)
            assert [int(cell[0]) for cell in cells_of(system)] == [count] * len(system.services)
        with changing(system):
            for _ in range(2):
                require_same(all_logits(system), expected)


def test_those_left_out_sleep_until_they_are_wanted_or_the_service_ends(tiny: Tiny) -> None:
    with InProcessSystem(tiny("llama-relu").path, num_threads=NUM_THREADS) as system:
        want(system, 2)
        system.logits("exact", IDS, [1])
        cells = cells_of(system)

        def await_sleepers(count: int) -> None:
            while any(cell[SLEEPERS] != count for cell in cells):
                time.sleep(0.001)

        await_sleepers(2)
        for _ in range(20):
            system.logits("exact", IDS, [1])
            assert [int(cell[SLEEPERS]) for cell in cells] == [2, 2]
        want(system, 1)
        system.logits("exact", IDS, [1])
        await_sleepers(1)
    assert [int(cell[0]) for cell in cells] == [ENDED, ENDED]
    for service in system.services:
        assert not any(thread.is_alive() for thread in service._threads)
