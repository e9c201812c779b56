"""A queue of reads: one thread submits spans of a file, reading threads complete them in order.

Computing threads poll or wait for the neurons that they need; reading threads join no barrier.
Spans that no thread has taken can be cancelled, so reads ahead never delay what is needed now.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.vectors import copy_numbers
from hotcold.numba_kernels.loops.doorbell import (
    INTS_A_CELL,
    atomic_add,
    atomic_load,
    atomic_replace,
    atomic_store,
    now_ns,
    ring,
    sleep_change,
    wait_change,
    wake,
    wake_some,
)
from hotcold.numba_kernels.storage.neuron_file import (
    GATE,
    UP_DOWN,
    NeuronReads,
    cut_spans,
    read_span,
)

NOW, NUM_BATCHES = 0, 3  # batch NOW is needed now; the others are read ahead, in turn
_TAKEN, _SUBMITTED, _STOP, _COMPLETED, _WAITING, _PENDING = range(6)  # cells
_NUM_CELLS = _PENDING + NUM_BATCHES  # the last for each batch
_IDLE_NS = 3_600_000_000_000
_POLL_NS = 100_000_000
_SPINS = 100
_SPANS_A_WAKE = np.int32(8)  # waking waiters for each completed span costs more than it gains
BATCH, FIRST, LAST = range(3)  # of a span
BYTES_READ, READ_NS, IS_RUNNING = range(3)  # words of `counts`
NOT_LOADED, LOADED, FAILED = np.int32(0), np.int32(1), np.int32(2)  # of a part of a neuron


class ReadQueue(NamedTuple):
    """Spans to read: each is neurons first..last-1 of a batch.

    cells (9 * 16,) int32: spans taken, submitted and completed so far, and each batch's pending
    spans
    spans (S, 3) int32, S a power of two: batch, first, last; span k is spans[k % S];
    firsts (M + 1,) int32: work space
    rows (batches, M) int32, parts (batches, M) uint8: `NeuronReads` of each batch
    requested_gates, requested_up_downs (N,) uint8, loaded_gates, loaded_up_downs (N,) int32: of
    `Slots`, of bundles' both parts; the same twice where units are whole bundles
    failure (2,) int64: of the last read that failed, as in `neuron_file.read_span`
    counts (threads, 8) int64: each thread's bytes read, nanoseconds, and whether it is running
    """

    cells: np.ndarray
    spans: np.ndarray
    firsts: np.ndarray
    rows: np.ndarray
    parts: np.ndarray
    requested_gates: np.ndarray
    requested_up_downs: np.ndarray
    loaded_gates: np.ndarray
    loaded_up_downs: np.ndarray
    failure: np.ndarray
    counts: np.ndarray


def new_queue(
    num_threads: int, most: int, requested: Sequence[np.ndarray], loaded: Sequence[np.ndarray]
) -> ReadQueue:
    """An empty queue for batches of up to `most` bundles; states of gates, of up and down rows."""
    num_spans = 1 << max(1, NUM_BATCHES * most).bit_length()
    return ReadQueue(
        cells=np.zeros(_NUM_CELLS * INTS_A_CELL, np.int32),
        spans=np.zeros((num_spans, 3), np.int32),
        firsts=np.zeros(most + 1, np.int32),
        rows=np.zeros((NUM_BATCHES, most), np.int32),
        parts=np.zeros((NUM_BATCHES, most), np.uint8),
        requested_gates=requested[0],
        requested_up_downs=requested[1],
        loaded_gates=loaded[0],
        loaded_up_downs=loaded[1],
        failure=np.zeros(2, np.int64),
        counts=np.zeros((num_threads, 8), np.int64),
    )


@njit(nogil=True, cache=True, inline="always")
def batch_reads(queue, batch):
    """A batch's neurons and parts, to be written before `submit_reads`."""
    return NeuronReads(queue.rows[batch], queue.parts[batch])


@njit(nogil=True, cache=True)
def num_pending(queue, batch):
    """A batch's pending spans; its neurons may only be changed at 0."""
    return atomic_load(queue.cells, (_PENDING + batch) * INTS_A_CELL)


@njit(nogil=True, cache=True)
def submit_reads(queue, file, batch, count, max_gap):
    """Submit the first `count` neurons of a batch, which has no pending span."""
    cells, spans, firsts = queue.cells, queue.spans, queue.firsts
    num_spans = cut_spans(file, batch_reads(queue, batch), count, max_gap, firsts)
    submitted = atomic_load(cells, _SUBMITTED * INTS_A_CELL)
    for k in range(num_spans):
        span = spans[np.int64(submitted + k) & (spans.shape[0] - 1)]
        span[BATCH], span[FIRST], span[LAST] = batch, firsts[k], firsts[k + 1]
    if num_spans:
        atomic_store(cells, (_PENDING + batch) * INTS_A_CELL, np.int32(num_spans))
        atomic_store(cells, _SUBMITTED * INTS_A_CELL, np.int32(submitted + num_spans))
        wake_some(cells, _SUBMITTED, num_spans)


@njit(nogil=True, cache=True)
def cancel_reads(queue):
    """Cancel all spans that no thread has taken: their bundles are not requested any more."""
    cells, spans = queue.cells, queue.spans
    submitted = atomic_load(cells, _SUBMITTED * INTS_A_CELL)
    taken = atomic_load(cells, _TAKEN * INTS_A_CELL)
    while taken != submitted and not atomic_replace(cells, _TAKEN * INTS_A_CELL, taken, submitted):
        taken = atomic_load(cells, _TAKEN * INTS_A_CELL)
    while taken != submitted:
        span = spans[np.int64(taken) & (spans.shape[0] - 1)]
        batch = span[BATCH]
        for i in range(span[FIRST], span[LAST]):
            row, parts = queue.rows[batch, i], queue.parts[batch, i]
            if parts & GATE:
                queue.requested_gates[row] = np.uint8(0)
            if parts & UP_DOWN:
                queue.requested_up_downs[row] = np.uint8(0)
        atomic_add(cells, (_PENDING + batch) * INTS_A_CELL, np.int32(-1))
        taken = np.int32(taken + 1)


@njit(nogil=True, cache=True)
def await_batch(queue, batch):
    """Wait until a batch has no pending span."""
    while True:
        left = num_pending(queue, batch)
        if left == 0:
            return
        wait_change(queue.cells, _PENDING + batch, left, _SPINS, _POLL_NS)


@njit(nogil=True, cache=True)
def num_completed(queue):
    """A number that changes with each completed span; read it before checking what is loaded."""
    return atomic_load(queue.cells, _COMPLETED * INTS_A_CELL)


@njit(nogil=True, cache=True)
def await_more(queue, seen):
    """Sleep until `num_completed` differs from `seen`, or a few more spans are completed."""
    cells = queue.cells
    atomic_add(cells, _WAITING * INTS_A_CELL, np.int32(1))
    sleep_change(cells, _COMPLETED, seen, _POLL_NS)
    atomic_add(cells, _WAITING * INTS_A_CELL, np.int32(-1))


@njit(nogil=True, cache=True)
def read_all(queue, file, count, max_gap):
    """Read the first `count` neurons of the batch NOW into their slots; False where a read failed.

    For Python. No other read may be pending: see `drain`.
    """
    queue.failure[:] = 0
    submit_reads(queue, file, NOW, count, max_gap)
    await_batch(queue, NOW)
    return queue.failure[0] == 0


@njit(nogil=True, cache=True)
def drain(queue):
    """`cancel_reads`, and wait for those in flight."""
    cancel_reads(queue)
    for batch in range(NUM_BATCHES):
        await_batch(queue, batch)


@njit(nogil=True, cache=True)
def drop_reads(queue):
    """`drain`, and forget what failed."""
    drain(queue)
    queue.failure[:] = 0


@njit(nogil=True, cache=True)
def free_batch(queue):
    """A batch of reads ahead with no pending span; NUM_BATCHES where there is none.

    Then the disk lags behind, and what is pending is enough.
    """
    batch = NOW + 1
    while batch < NUM_BATCHES and num_pending(queue, batch):
        batch += 1
    return batch


@njit(nogil=True, cache=True)
def stop_readers(queue):
    """Let all reading threads return."""
    cells = queue.cells
    atomic_store(cells, _STOP * INTS_A_CELL, np.int32(1))
    atomic_store(cells, _TAKEN * INTS_A_CELL, atomic_load(cells, _SUBMITTED * INTS_A_CELL))
    ring(cells, _SUBMITTED, np.int32(atomic_load(cells, _SUBMITTED * INTS_A_CELL) + 1))


@njit(nogil=True, cache=True)
def next_span(queue, span):
    """Take the next span: copy it to `span`; False where there is none."""
    cells, spans = queue.cells, queue.spans
    while True:
        taken = atomic_load(cells, _TAKEN * INTS_A_CELL)
        if taken == atomic_load(cells, _SUBMITTED * INTS_A_CELL):
            return False
        copy_numbers(spans[np.int64(taken) & (spans.shape[0] - 1)], span)
        # A span is only overwritten after it was taken: then this fails.
        if atomic_replace(cells, _TAKEN * INTS_A_CELL, taken, np.int32(taken + 1)):
            return True


@njit(nogil=True, cache=True)
def _count_completed(queue, batch):
    """A span of the batch was completed or failed: wake waiters."""
    cells = queue.cells
    left = np.int32(atomic_add(cells, (_PENDING + batch) * INTS_A_CELL, np.int32(-1)) - 1)
    atomic_add(cells, _COMPLETED * INTS_A_CELL, np.int32(1))
    if left == 0:
        wake(cells, _PENDING + batch)
    is_time = batch != NOW or left % _SPANS_A_WAKE == 0
    if is_time and atomic_load(cells, _WAITING * INTS_A_CELL) != 0:
        wake(cells, _COMPLETED)


@njit(nogil=True, cache=True)
def complete_span(queue, span, num_bytes):
    """Mark a span's neurons as LOADED, or FAILED if it has no bytes, in `Slots.loaded`."""
    batch, found = np.int64(span[BATCH]), LOADED if num_bytes else FAILED
    for i in range(span[FIRST], span[LAST]):
        row, parts = np.int64(queue.rows[batch, i]), queue.parts[batch, i]
        if parts & GATE:
            atomic_store(queue.loaded_gates, row, found)
        if parts & UP_DOWN:
            atomic_store(queue.loaded_up_downs, row, found)
    _count_completed(queue, batch)


@njit(nogil=True, cache=True)
def is_stopped(queue):
    """Whether `stop_readers` was called."""
    return atomic_load(queue.cells, _STOP * INTS_A_CELL) != 0


@njit(nogil=True, cache=True)
def num_submitted(queue):
    """A number that changes with each `submit_reads`; read it before taking spans."""
    return atomic_load(queue.cells, _SUBMITTED * INTS_A_CELL)


@njit(nogil=True, cache=True)
def await_spans(queue, seen):
    """Sleep until `num_submitted` differs from `seen`."""
    sleep_change(queue.cells, _SUBMITTED, seen, _IDLE_NS)


@njit(nogil=True, cache=True)
def serve_reads(thread, queue, file, staging, target, span):
    """A reading thread's loop until `stop_readers`; `staging` and `span` are this thread's own.

    Spans are read into rows of `target` and completed by `complete_span`; span (3,) int32.
    """
    counts = queue.counts[thread]
    counts[IS_RUNNING] = 1
    while not is_stopped(queue):
        seen = num_submitted(queue)
        if not next_span(queue, span):
            await_spans(queue, seen)
            continue
        if is_stopped(queue):
            return  # `stop_readers` lets threads take what is no span
        started = now_ns()
        reads = batch_reads(queue, np.int64(span[BATCH]))
        num_bytes = read_span(file, reads, span[FIRST], span[LAST], staging, target, queue.failure)
        counts[BYTES_READ] += num_bytes
        counts[READ_NS] += now_ns() - started
        complete_span(queue, span, num_bytes)
