"""Threads that read spans of a file, many at once, and those who wait for them.

A reading thread holds a ticket: the number of the next span that nobody has taken. It waits until
so many spans have been asked for, reads its own, and counts it as done. It joins no barrier, and
whoever waits for a batch may look at what has come.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from numba_kernels.serve.doorbell import (
    INTS_A_CELL,
    atomic_add,
    atomic_load,
    atomic_store,
    now_ns,
    ring,
    sleep_change,
    wait_change,
    wake,
)
from numba_kernels.storage.neuron_file import cut_spans, read_span

TICKETS, _ASKED, _LEFT, _STOP = range(4)
NUM_CELLS = 4
_IDLE_NS = 3_600_000_000_000
_LOOK_NS = 100_000_000
_SPINS = 100
BYTES_READ, READ_NS = 0, 1  # words of `counts`


class ReadQueue(NamedTuple):
    """Spans to be read: span k is wanted neurons firsts[k]..firsts[k + 1] - 1 of the batch.

    cells (64,) int32: doorbells; base (2,) int32: the ticket of the batch's first span, and which
    of the targets its rows go to
    firsts (M + 1,) int32; failure (2,) int64: see `neuron_file.read_span`; of the last that failed
    counts (threads, 8) int64: bytes read by each thread, and nanoseconds that it took
    """

    cells: np.ndarray
    base: np.ndarray
    firsts: np.ndarray
    failure: np.ndarray
    counts: np.ndarray


def new_queue(num_threads: int, most: int) -> ReadQueue:
    """For batches of up to `most` neurons."""
    return ReadQueue(
        cells=np.zeros(NUM_CELLS * INTS_A_CELL, np.int32),
        base=np.zeros(2, np.int32),
        firsts=np.zeros(most + 1, np.int32),
        failure=np.zeros(2, np.int64),
        counts=np.zeros((num_threads, 8), np.int64),
    )


@njit(nogil=True, cache=True)
def ask_for(queue, num_spans, target):
    """Let the reading threads read a batch of spans into target number `target`.

    The batch before has been waited for.
    """
    cells = queue.cells
    queue.failure[:] = 0
    if num_spans == 0:
        return
    asked = atomic_load(cells, _ASKED * INTS_A_CELL)
    queue.base[0], queue.base[1] = asked, target
    atomic_store(cells, _LEFT * INTS_A_CELL, np.int32(num_spans))
    ring(cells, _ASKED, np.int32(asked + num_spans))


@njit(nogil=True, cache=True)
def await_reads(queue):
    """Return when all of the batch has been read, or has failed."""
    while True:
        left = atomic_load(queue.cells, _LEFT * INTS_A_CELL)
        if left == 0:
            return
        wait_change(queue.cells, _LEFT, left, _SPINS, _LOOK_NS)


@njit(nogil=True, cache=True)
def read_all(queue, file, wanted, count, most_bytes, most_gap, target):
    """Read `count` wanted neurons into target number `target`; whether all came."""
    ask_for(queue, cut_spans(file, wanted, count, most_bytes, most_gap, queue.firsts), target)
    await_reads(queue)
    return queue.failure[0] == 0


@njit(nogil=True, cache=True)
def stop_readers(queue):
    """Let all reading threads end; nothing is being read."""
    cells = queue.cells
    atomic_store(cells, _STOP * INTS_A_CELL, np.int32(1))
    ring(cells, _ASKED, np.int32(atomic_load(cells, _ASKED * INTS_A_CELL) + 1))


@njit(nogil=True, cache=True)
def serve_reads(thread, queue, file, wanted, staging, targets):
    """Read what is asked for, until `stop_readers`; `staging` is this thread's own.

    `targets` is a tuple of `neuron_file.RowBytes`.
    """
    cells, counts = queue.cells, queue.counts[thread]
    while True:
        ticket = atomic_add(cells, TICKETS * INTS_A_CELL, np.int32(1))
        asked = atomic_load(cells, _ASKED * INTS_A_CELL)
        while np.int32(asked - ticket) <= 0 and not atomic_load(cells, _STOP * INTS_A_CELL):
            asked = sleep_change(cells, _ASKED, asked, _IDLE_NS)  # numbers turn over
        if atomic_load(cells, _STOP * INTS_A_CELL):
            return
        span = np.int64(np.int32(ticket - queue.base[0]))
        started = now_ns()
        first, last = queue.firsts[span], queue.firsts[span + 1]
        target = targets[queue.base[1]]
        counts[BYTES_READ] += read_span(file, wanted, first, last, staging, target, queue.failure)
        counts[READ_NS] += now_ns() - started
        if atomic_add(cells, _LEFT * INTS_A_CELL, np.int32(-1)) == 1:
            wake(cells, _LEFT)  # whoever looked has begun the next batch already
