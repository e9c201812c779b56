"""One thread that keeps many reads under way by an io_uring; else as `read_queue.serve_reads`."""

import numpy as np

from numba_kernels.compiler import njit
from numba_kernels.serve.doorbell import now_ns
from numba_kernels.storage.reads.io_ring import MOST_TOGETHER, add_read, next_done, submit
from numba_kernels.storage.reads.neuron_file import DESCRIPTOR, read_span, span_bytes, take_span
from numba_kernels.storage.reads.read_queue import (
    BATCH,
    BYTES_READ,
    FIRST,
    HAS_BEGUN,
    LAST,
    READ_NS,
    await_spans,
    finish_span,
    is_stopped,
    num_asked,
    take_next,
    wanted_of,
)


@njit(nogil=True, cache=True)
def _begin_spans(queue, file, ring, staging, spans, busy):
    """Have the next spans read, as many as there are free buffers."""
    for k in range(busy.shape[0]):
        span = spans[k]
        if busy[k]:
            continue
        if not take_next(queue, span) or is_stopped(queue):
            return
        wanted = wanted_of(queue, np.int64(span[BATCH]))
        begin, size = span_bytes(file, wanted, span[FIRST], span[LAST])
        address = np.int64(staging[k].ctypes.data)
        add_read(ring, k, file.facts[DESCRIPTOR], begin, address, size)
        busy[k] = 1


@njit(nogil=True, cache=True)
def _take(queue, file, span, result, staging, target):
    """Rows of a span whose read is done; the bytes read, or 0 where it failed."""
    wanted = wanted_of(queue, np.int64(span[BATCH]))
    begin, size = span_bytes(file, wanted, span[FIRST], span[LAST])
    is_whole = result == size
    if is_whole and take_span(file, wanted, span[FIRST], span[LAST], begin, staging, target) < 0:
        return size
    return read_span(file, wanted, span[FIRST], span[LAST], staging, target, queue.failure)


@njit(nogil=True, cache=True)
def _give_up(queue, spans, busy, held_gates, held_rests, status):
    """All that is under way failed: the ring itself did."""
    for k in np.flatnonzero(busy):
        row = queue.rows[spans[k, BATCH], spans[k, FIRST]]
        queue.failure[1], queue.failure[0] = row, status
        finish_span(queue, spans[k], False, held_gates, held_rests)
        busy[k] = 0


@njit(nogil=True, cache=True)
def serve_ring(queue, file, held_gates, held_rests, staging, target, ring):
    """Read what is asked for, until `stop_readers`, as many spans at once as `staging` has rows.

    staging (D, bytes of the longest span) uint8, rows aligned to the file's unit; others as of
    `serve_reads`. A read that fails, comes short or is damaged is tried as there.
    """
    counts, depth = queue.counts[0], staging.shape[0]
    spans, busy = np.zeros((depth, 3), np.int32), np.zeros(depth, np.uint8)
    counts[HAS_BEGUN] = 1
    while True:
        seen = num_asked(queue)
        if not is_stopped(queue):
            _begin_spans(queue, file, ring, staging, spans, busy)
        num_reads = busy.sum()
        if num_reads == 0:
            if is_stopped(queue):
                return
            await_spans(queue, seen)
            continue
        started = now_ns()
        status = submit(ring, min(MOST_TOGETHER, 1 + num_reads // 4))
        if status != 0:
            _give_up(queue, spans, busy, held_gates, held_rests, status)
        k, result = next_done(ring)
        while k >= 0:
            if busy[k]:
                span = spans[k]
                num_bytes = _take(queue, file, span, result, staging[k], target)
                counts[BYTES_READ] += num_bytes
                finish_span(queue, span, num_bytes > 0, held_gates, held_rests)
                busy[k] = 0
            k, result = next_done(ring)
        counts[READ_NS] += now_ns() - started
