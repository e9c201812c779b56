"""Threads that go through a list of phases side by side, with a barrier after each.

Handing work to a thread and hearing that it is done takes as long as a small model's matmul. So a
request's phases are handed over together, and the barrier between two of them is a doorbell.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL, ring, wait_change

_POLLS, _WAIT_NS = 2000, 100_000_000
_ROUNDS = 1 << 30  # the doorbell is a 32-bit number

Phase = Callable[[int], None]  # of the thread's number
Then = Callable[[Phase], None]  # has every thread go through a phase, after those before


class _Abandoned(Exception):
    """Another thread failed, and will not reach the barrier."""


class ThreadTeam:
    """A fixed number of threads, each of which does its share of every phase."""

    def __init__(self, num_threads: int, begin: Phase) -> None:
        """Each thread calls `begin` first."""
        self.num_threads = num_threads
        # A pool for each, so that rows are always read from the same cores.
        self._pools = [
            ThreadPoolExecutor(1, "matmul", begin, (thread,)) for thread in range(num_threads)
        ]
        self._cells = np.zeros(INTS_A_CELL, np.int32)
        self._counting = threading.Lock()
        self._num_arrived = self._round = 0
        self._has_failed = False

    def run(self, phases: Sequence[Phase]) -> None:
        """Every thread goes through `phases`; no phase begins before all have ended the last one.

        Errors:  what a phase raises; the others then stop after theirs
        """
        self._has_failed, self._num_arrived = False, 0
        calls = [pool.submit(self._go, thread, phases) for thread, pool in enumerate(self._pools)]
        wait(calls)  # all of them: the next phases use the same buffers
        errors = [error for call in calls if (error := call.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, _Abandoned)):
            raise error

    def close(self) -> None:
        """End the threads."""
        for pool in self._pools:
            pool.shutdown()

    def _go(self, thread: int, phases: Sequence[Phase]) -> None:
        try:
            for number, phase in enumerate(phases):
                if number:
                    self._await_all()
                phase(thread)
        except BaseException:
            self._has_failed = True
            raise

    def _await_all(self) -> None:
        """The barrier. Errors: _Abandoned where another thread failed."""
        with self._counting:
            seen = self._round
            self._num_arrived += 1
            is_last = self._num_arrived == self.num_threads
            if is_last:
                self._num_arrived, self._round = 0, (seen + 1) % _ROUNDS
        if is_last:
            ring(self._cells, 0, self._round)
        while not is_last and wait_change(self._cells, 0, seen, _POLLS, _WAIT_NS) == seen:
            if self._has_failed:
                raise _Abandoned
