"""Doorbells, barriers and mailboxes: between threads, and between processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from llvmlite import binding
from numba import njit, types

from hotcold.numba_kernels.loops.doorbell import (
    CROWDED_US,
    INTS_A_CELL,
    SLEEPERS,
    atomic_load,
    atomic_store,
    clock_ns,
    ring,
    wait_change,
)
from hotcold.numba_kernels.loops.mailbox import (
    CELLS_A_SERVICE,
    NO_COUNTERS,
    NUM_REPLY_WORDS,
    NUM_REQUEST_WORDS,
    await_done,
    finish_request,
    post,
)

SECOND = 1_000_000_000
LONG = 120 * SECOND  # longer than any pause of the whole process in a test


def new_cells(num_cells: int) -> np.ndarray:
    return np.zeros(num_cells * INTS_A_CELL, np.int32)


@contextmanager
def threads(*targets: Callable[[], None]) -> Iterator[None]:
    """Run the targets beside the block; all must then end, and none may fail."""
    failures: list[BaseException] = []

    def guarded(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as failure:
            failures.append(failure)

    running = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in targets]
    for thread in running:
        thread.start()
    yield
    for thread in running:
        thread.join(150)
    assert not any(thread.is_alive() for thread in running)
    if failures:
        raise failures[0]


def test_a_waiter_that_notices_late_marks_the_doorbell_crowded() -> None:
    """Another program takes the core each time it is yielded, and keeps it after a ring."""
    core = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, [{core}])\nwhile os.getppid() == {os.getpid()}: pass"
    )
    cells, ended = new_cells(2), threading.Event()

    def answer() -> None:
        os.sched_setaffinity(0, [core])
        number = np.int32(0)
        while not ended.is_set():
            number = np.int32(wait_change(cells, 0, number, 100, SECOND // 10))
            ring(cells, 1, number)

    with subprocess.Popen([sys.executable, "-c", code]) as other, threads(answer):
        try:
            end = time.monotonic() + 60
            for number in range(1, 1 << 30):
                time.sleep(0.002)
                ring(cells, 0, np.int32(number))
                assert wait_change(cells, 1, np.int32(number - 1), 0, LONG) == number
                if cells[CROWDED_US]:
                    break
                assert time.monotonic() < end
        finally:
            ended.set()
            other.kill()


@pytest.mark.parametrize("num_killed", [0, 3])
def test_a_doorbell_counts_sleeping_threads(num_killed: int) -> None:
    """Only then a ring makes a system call; threads killed asleep stay counted."""
    cells = new_cells(2)
    cells[INTS_A_CELL + SLEEPERS] = num_killed

    def wait() -> None:
        assert wait_change(cells, 1, np.int32(0), 0, LONG) == 1

    with threads(wait, wait):
        while cells[INTS_A_CELL + SLEEPERS] < num_killed + 2:
            time.sleep(0.001)
        ring(cells, 1, np.int32(1))
    assert cells[INTS_A_CELL + SLEEPERS] == num_killed
    assert cells[SLEEPERS] == 0


def test_an_answer_to_an_older_request_is_not_taken() -> None:
    cells, replies = new_cells(CELLS_A_SERVICE), np.zeros((1, NUM_REPLY_WORDS), np.int64)
    requests = np.zeros((1, NUM_REQUEST_WORDS), np.int64)
    post(cells, 0, 5)
    for older in (3, 4):
        finish_request(cells, requests, replies, NO_COUNTERS, 0, np.int32(older), 1, clock_ns())
        assert not await_done(cells, 0, 5, SECOND // 50)
    finish_request(cells, requests, replies, NO_COUNTERS, 0, np.int32(5), 1, clock_ns())
    assert await_done(cells, 0, 5, 0)


def test_a_load_is_not_reordered_before_an_earlier_store() -> None:
    """ARM CPUs with RCPC have a load that is, `ldapr`; `close_task` relies on the other."""

    @njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False)
    def store_and_load(cells):
        atomic_store(cells, 0, np.int32(1))
        return atomic_load(cells, 16)

    store_and_load.compile((types.int32[::1],))
    (text,) = store_and_load.inspect_llvm().values()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("aarch64-unknown-linux-gnu")
    machine = target.create_target_machine(features="+rcpc")
    module = binding.parse_assembly(text)
    module.triple, module.data_layout = target.triple, str(machine.target_data)
    assembly = machine.emit_assembly(module)
    assert "\tstlr\t" in assembly and "\tldar\t" in assembly and "ldapr" not in assembly
