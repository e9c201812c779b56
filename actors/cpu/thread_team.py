"""Threads that go through a list of phases side by side, with a barrier after each.

Handing work to a thread and hearing that it is done takes as long as a small model's matmul. So a
request's phases are handed over together, and the barrier between two of them is a doorbell.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL, ring, wait_change

_POLLS, _WAIT_NS = 2000, 100_000_000
_ROUNDS = 1 << 30  # the doorbell is a 32-bit number
# How much work makes a cut worth a call from Python: multiplications of each piece.
_WORTH = 1 << 28
MOST_CUTS = 4  # a thread's smallest piece is a quarter of its part

Phase = Callable[[int], None]  # of the thread's number
Then = Callable[[Phase], None]  # has every thread go through a phase, after those before
PartOf = Callable[[int, int, int], None]  # of the thread's number, a part's, and of how many parts


class Shared:
    """A phase whose work threads take piece by piece, so that a slow one takes less.

    Each thread has a part, cut into pieces that become smaller, and goes through it before it takes
    pieces of others' parts. Which thread computes a piece must not matter to the result.
    """

    def __init__(
        self, num_threads: int, num_products: int, compute: PartOf, most_cuts: int = MOST_CUTS
    ) -> None:
        """compute(thread, part, count) does part `part` of `count` equal parts of the work.

        num_products: multiplications of the whole phase, about; of little work nothing is cut.
        most_cuts: into which a thread's part is cut at most, MOST_CUTS or fewer
        """
        self._compute = compute
        cuts = min(most_cuts, num_products // max(1, num_threads * _WORTH))
        self._pieces = [
            [(thread * of + part, num_threads * of) for part, of in _pieces(cuts)]
            for thread in range(num_threads)
        ]
        # `next` of a count is atomic: the interpreter's lock is held.
        self._taken = [itertools.count() for _ in range(num_threads)]

    def __call__(self, thread: int) -> None:
        """The phase, by thread number `thread`."""
        num_threads = len(self._pieces)
        for turn in range(num_threads):
            owner = (thread + turn) % num_threads
            pieces, taken = self._pieces[owner], self._taken[owner]
            while (number := next(taken)) < len(pieces):
                self._compute(thread, *pieces[number])


def _pieces(cuts: int) -> list[tuple[int, int]]:
    """A half, a quarter ..., and the last piece twice: (number, of how many), at most of `cuts`."""
    found, of = [], 1
    while 2 * of <= cuts:
        of *= 2
        found.append((of - 2, of))
    return [*found, (of - 1, of)]


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
