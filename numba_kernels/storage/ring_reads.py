"""`read_queue.serve_reads` by one thread that keeps many reads in flight with io_uring."""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.loops.doorbell import now_ns
from hotcold.numba_kernels.storage.io_ring import MAX_WAIT_READS, add_read, next_completion, submit
from hotcold.numba_kernels.storage.neuron_file import DESCRIPTOR, copy_span, read_span, span_bytes
from hotcold.numba_kernels.storage.read_queue import (
    BATCH,
    BYTES_READ,
    FIRST,
    IS_RUNNING,
    LAST,
    READ_NS,
    await_spans,
    batch_reads,
    complete_span,
    is_stopped,
    next_span,
    num_submitted,
    serve_reads,
)


@njit(nogil=True, cache=True)
def _begin_spans(queue, file, ring, staging, spans, busy):
    """Queue the next spans, as many as there are free buffers."""
    for k in range(busy.shape[0]):
        span = spans[k]
        if busy[k]:
            continue
        if not next_span(queue, span) or is_stopped(queue):
            return
        reads = batch_reads(queue, np.int64(span[BATCH]))
        begin, size = span_bytes(file, reads, span[FIRST], span[LAST])
        address = np.int64(staging[k].ctypes.data)
        add_read(ring, k, file.facts[DESCRIPTOR], begin, address, size)
        busy[k] = 1


@njit(nogil=True, cache=True)
def _finish_read(queue, file, span, result, staging, target):
    """Copy the rows of a span whose read is done; returns its bytes, or 0 where it failed."""
    reads = batch_reads(queue, np.int64(span[BATCH]))
    begin, size = span_bytes(file, reads, span[FIRST], span[LAST])
    is_whole = result == size
    if is_whole and copy_span(file, reads, span[FIRST], span[LAST], begin, staging, target) < 0:
        return size
    return read_span(file, reads, span[FIRST], span[LAST], staging, target, queue.failure)


@njit(nogil=True, cache=True)
def go_on_without_ring(queue, file, staging, target, spans, busy):
    """Read the spans in flight of a ring that failed, then go on as `serve_reads`.

    `staging` is not the ring's: the kernel may still write there.
    """
    for k in range(busy.shape[0]):
        if not busy[k]:
            continue
        span = spans[k]
        reads = batch_reads(queue, np.int64(span[BATCH]))
        num_bytes = read_span(file, reads, span[FIRST], span[LAST], staging, target, queue.failure)
        complete_span(queue, span, num_bytes)
    serve_reads(0, queue, file, staging, target, spans[0])


@njit(nogil=True, cache=True)
def serve_ring(queue, file, staging, target, ring, spans, busy):
    """`serve_reads` with as many spans in flight as `staging` has rows.

    staging (D, bytes of the longest span) uint8, rows aligned to the file's unit; spans (D, 3)
    int32 and busy (D,) uint8: the spans in flight, none at first. Failed, short and damaged reads
    are retried by `read_span`. Returns 0, or an errno where the ring itself failed: then the kernel
    may still write to `staging`, which has to stay.
    """
    counts = queue.counts[0]
    counts[IS_RUNNING] = 1
    while True:
        seen = num_submitted(queue)
        if not is_stopped(queue):
            _begin_spans(queue, file, ring, staging, spans, busy)
        num_reads = np.int64(busy.sum())
        if num_reads == 0:
            if is_stopped(queue):
                return np.int64(0)
            await_spans(queue, seen)
            continue
        started = now_ns()
        status = submit(ring, min(MAX_WAIT_READS, 1 + num_reads // 4))
        if status != 0:
            return status
        k, result = next_completion(ring)
        while k >= 0:
            span = spans[k]
            num_bytes = _finish_read(queue, file, span, result, staging[k], target)
            counts[BYTES_READ] += num_bytes
            complete_span(queue, span, num_bytes)
            busy[k] = 0
            k, result = next_completion(ring)
        counts[READ_NS] += now_ns() - started
