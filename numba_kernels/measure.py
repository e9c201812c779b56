"""Compiled loops that time kernels, memory, disk and exchange."""

from __future__ import annotations

import numpy as np

from hotcold.numba_kernels.checks import RELU
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import Activation, Thresholds
from hotcold.numba_kernels.decode.ffn import gate_values_kernel
from hotcold.numba_kernels.decode.predict import (
    lowrank_hidden_kernel,
    lowrank_scores_kernel,
    pack_planes_kernel,
    sign_scores_kernel,
)
from hotcold.numba_kernels.decode.rows import rows_kernel
from hotcold.numba_kernels.decode.selection import NO_MASKS, NO_WEIGHTS, Selection
from hotcold.numba_kernels.decode.vectors import NO_BIAS, quantize_activations
from hotcold.numba_kernels.ffn.layer_ffn import layer_ffn
from hotcold.numba_kernels.ir.peak_ir import multiply_often
from hotcold.numba_kernels.ir.vector_ir import prefetch_row
from hotcold.numba_kernels.loops.doorbell import atomic_add, barrier, now_ns
from hotcold.numba_kernels.loops.mailbox import (
    BUSY_NS,
    OPERATION,
    STOP,
    barrier_wait,
    finish_request,
    next_request,
    post_and_await,
)
from hotcold.numba_kernels.storage.direct_file import SHORT, read_bytes
from hotcold.numba_kernels.storage.io_ring import MAX_WAIT_READS, add_read, next_completion, submit

NOT_ANSWERED = np.iinfo(np.int64).min


@njit(nogil=True, cache=True)
def read_row(words):
    """The sum of 64-bit words.

    Shapes:  words (W,)
    Dtypes:  words uint64
    """
    total = np.uint64(0)
    for i in range(words.shape[0]):
        total += words[i]
    return total


@njit(nogil=True, cache=True)
def read_listed(gate, up, down, ids, first, last):
    """The sum of each layer's gate rows of ids[first:last], then four up rows, four down rows, ...

    Shapes:  gate, up, down (L * N, W); ids (L, A)
    Dtypes:  gate, up, down uint64; ids int32
    """
    total, rows = np.uint64(0), gate.shape[0] // ids.shape[0]
    for layer in range(ids.shape[0]):
        base, listed = layer * rows, ids[layer]
        for i in range(first, last):
            if i + 2 < last:
                prefetch_row(gate, base + listed[i + 2])
            total += read_row(gate[base + listed[i]])
        for i in range(first, last, 4):
            for matrix in (up, down):
                for k in range(i, min(i + 4, last)):
                    if k + 2 < last:
                        prefetch_row(matrix, base + listed[k + 2])
                    total += read_row(matrix[base + listed[k]])
    return total


@njit(nogil=True, cache=True)
def dense_part(weights, x, scratch, thread, out, first, last):
    """`rows_kernel` of x, quantized first for quantized weights."""
    vectors = quantize_activations(weights, x, scratch, thread)
    rows_kernel(weights, NO_BIAS, vectors, out, first, last)


@njit(nogil=True, cache=True)
def peak_part(weights, data, rounds, out):
    """How many products `multiply_often` makes in so many rounds; out (1,) float32: their sum."""
    out[0], count = multiply_often(weights, data, rounds)
    return count


@njit(nogil=True, cache=True)
def sparse_part(thread, num_threads, cells, arrays, ids, x, scratch, out):
    """The FFN of every layer over its ids, all of which fire."""
    for layer in range(ids.shape[0]):
        layer_ffn(
            thread, num_threads, cells, 0, layer,
            Selection(True, ids[layer], NO_MASKS, NO_WEIGHTS),
            Thresholds(np.float32(-1), np.float32(-1)), x, arrays, scratch,
            Activation(RELU, np.float32(0)), out,
            out.reshape(1, *out.shape)[:0],
        )  # fmt: skip
        barrier_wait(cells, 0, num_threads)


@njit(nogil=True, cache=True)
def read_passes(items, cells, num_threads, times):
    """Sum items (W,) uint64 once for each row of `times` (passes, 2) int64 ns: begin and end."""
    total = np.uint64(0)
    for i in range(times.shape[0]):
        barrier(cells, 0, 1, num_threads)
        times[i, 0] = now_ns()
        total += read_row(items)
        times[i, 1] = now_ns()
    return total  # an unused sum would not be computed


@njit(nogil=True, cache=True)
def rows_passes(weights, x, out, first, last, cells, num_threads, times):
    """`rows_kernel`, timed as `read_passes`."""
    for i in range(times.shape[0]):
        barrier(cells, 0, 1, num_threads)
        times[i, 0] = now_ns()
        rows_kernel(weights, NO_BIAS, x, out, first, last)
        times[i, 1] = now_ns()


@njit(nogil=True, cache=True)
def gather_passes(thread, num_threads, cells, arrays, ids, x, scratch, out, times):
    """The FFN of one layer over ids[i] in pass i, timed as `read_passes`."""
    for i in range(times.shape[0]):
        barrier(cells, 0, 1, num_threads)
        times[i, 0] = now_ns()
        layer_ffn(
            thread, num_threads, cells, 0, 0, Selection(True, ids[i], NO_MASKS, NO_WEIGHTS),
            Thresholds(np.float32(0), np.float32(-1)), x, arrays, scratch,
            Activation(RELU, np.float32(0)), out,
            out.reshape(1, *out.shape)[:0],
        )  # fmt: skip
        times[i, 1] = now_ns()


@njit(nogil=True, cache=True)
def read_places(descriptor, unit, keeps_pages, places, size, max_ns, taken, into):
    """Read `size` bytes at places[i] for each next i that no thread has taken; 0, or a failure.

    taken (1,) int32 is shared by threads. Returns at the last place, or after `max_ns`.
    """
    started = now_ns()
    while now_ns() - started < max_ns:
        i = np.int64(atomic_add(taken, 0, np.int32(1)))
        if i >= places.shape[0]:
            break
        status = read_bytes(descriptor, places[i], size, unit, keeps_pages, into[:size])
        if status != 0:
            return status
    return np.int64(0)


@njit(nogil=True, cache=True, _nrt=True)
def read_places_by_ring(ring, descriptor, places, size, max_ns, done, into):
    """`read_places` by one thread with io_uring, as many reads in flight as `into` has rows.

    done (1,) int64 receives the number of reads; none starts after `max_ns`.
    """
    started, num_begun, status = now_ns(), 0, np.int64(0)
    free, num_free = np.arange(into.shape[0]), into.shape[0]
    done[0] = 0
    while True:
        while num_free and num_begun < places.shape[0] and now_ns() - started < max_ns:
            k = free[num_free - 1]
            address = np.int64(into[k].ctypes.data)
            add_read(ring, k, descriptor, places[num_begun], address, size)
            num_free, num_begun = num_free - 1, num_begun + 1
        if num_free == into.shape[0]:
            return status
        failed = submit(ring, min(MAX_WAIT_READS, 1 + (into.shape[0] - num_free) // 4))
        if failed != 0:
            return failed
        k, result = next_completion(ring)
        while k >= 0:
            if result != size:
                status, max_ns = np.int64(SHORT) if result >= 0 else -result, np.int64(0)
            free[num_free] = k
            num_free += 1
            done[0] += 1
            k, result = next_completion(ring)


@njit(nogil=True, cache=True)
def gates_of(gate, ids, x, scratch, values):
    """values[i] = relu(gate[ids[i]] . x[0]), of all rows where `ids` is empty.

    Shapes:  gate (N, row items), ids (A,), x (1, d), values (A,) or (N,)
    """
    vectors = quantize_activations(gate, x, scratch, 0)
    function, count = Activation(RELU, np.float32(0)), values.shape[0]
    gate_values_kernel(gate, NO_BIAS, ids, 0, 0, vectors, function, 0, count, count, values)


@njit(nogil=True, cache=True)
def signs_of(bits, planes, x, center, scale, thresholds, out):
    """Scores of a sign predictor for each of several layers.

    Shapes:  bits (L, N, P * W), planes (3, W) uint64; x, center, scale (d,), thresholds,
             out (N,) float32
    """
    for layer in range(bits.shape[0]):
        unit = pack_planes_kernel(x, center, scale, planes)
        sign_scores_kernel(bits[layer], planes, unit, x.shape[0], thresholds, out, 0, out.shape[0])


@njit(nogil=True, cache=True)
def lowrank_of(down, scales, up, x, hidden, thresholds, out):
    """Scores of a low-rank predictor for each of several layers.

    Shapes:  down (L, r, d), up (L, r, N); scales (r,), x (1, d), hidden (1, r), thresholds,
             out (N,) float32
    """
    for layer in range(down.shape[0]):
        lowrank_hidden_kernel(down[layer], scales, x, hidden, 0, scales.shape[0])
        lowrank_scores_kernel(up[layer], hidden[0], thresholds, out, 0, out.shape[0])


@njit(nogil=True, cache=True)
def work_until_stopped(cells, requests, replies, service, num_threads, work_ns):
    """One thread of a service that works `work_ns` for each request, until STOP."""
    seen = np.int32(0)
    while True:
        seen = next_request(cells, service, seen)
        if requests[service, OPERATION] == STOP:
            return
        started_ns = now_ns()
        while now_ns() < started_ns + work_ns:
            pass
        finish_request(cells, requests, replies, cells[:0], service, seen, num_threads, started_ns)


@njit(nogil=True, cache=True, _nrt=True)
def request_in_turn(cells, replies, first, others, rounds, timeout_ns):
    """What each request took beyond the services' longest work, (2 * rounds,) ns."""
    costs_ns = np.full(2 * rounds, NOT_ANSWERED, np.int64)
    for i in range(2 * rounds):
        services = first if i % 2 == 0 else others
        started_ns = now_ns()
        if post_and_await(cells, services, i // 2 + 1, timeout_ns) < services.shape[0]:
            return costs_ns
        took_ns = now_ns() - started_ns
        longest_ns = 0
        for service in services:
            longest_ns = max(longest_ns, replies[service, BUSY_NS])
        costs_ns[i] = took_ns - longest_ns
    return costs_ns
