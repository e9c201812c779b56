"""A layer's dense feed-forward network: all gates, and a down projection with a row per output.

Without a predictor the down projection can stay as files have it, in their format; a row per neuron
(`numba_kernels.serve.layer_ffn`) would have to be quantized again. Threads share each matrix by
work stealing; a dot product does not depend on the thread that computes it. Thresholds skip up rows
and zero neurons that add too little; down rows are read whole.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import activate, activate_up, passes
from hotcold.numba_kernels.decode.batch_ffn import contribution
from hotcold.numba_kernels.decode.ffn import (
    drop_small,
    keep_fired_kernel,
    scale_by_up,
)
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.selection import NO_IDS, NO_MASKS
from hotcold.numba_kernels.decode.vectors import (
    QuantizedVectors,
    empty_vectors,
    quantize_activations,
)
from hotcold.numba_kernels.layer_rows import LayerRows
from hotcold.numba_kernels.serve.doorbell import now_ns
from hotcold.numba_kernels.serve.layer_ffn import NO_NORMS, part_of
from hotcold.numba_kernels.serve.mailbox import (
    ALL_FIRED,
    ALL_GATES,
    FFN,
    LAST_FIRED,
    LAST_GATES,
    LAYER,
    NUM_COMPUTED,
    NUM_IDS,
    NUM_TOKENS,
    NUM_UP,
    OPERATION,
    PING,
    WATCHED,
    barrier_wait,
    finish_request,
    next_request,
    read_thresholds,
)
from hotcold.numba_kernels.serve.work_stealing import (
    new_block_counters,
    work_stealing_layer,
    work_stealing_rows,
)

_GATE, _UP, _DOWN, _DOWN_SECOND = range(4)
_NUM_COUNTERS = 4
_GROUP = 16  # neurons of a cache line of values


class DenseFfnArrays(NamedTuple):
    """A shard with N neurons of each layer: layer l has rows offsets[l]:offsets[l + 1].

    offsets (L + 1,) int64; gate, up (L * N, d) weights, up (0, d) in a two-matrix FFN; down: d rows
    a layer, of N weights each; gate_bias, up_bias (L * N,) or (0,), down_bias (L, d) or (L, 0)
    float32; down_norms (L * N,) or (0,) float32: norms of down's columns, for product thresholds
    """

    offsets: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: LayerRows
    gate_bias: np.ndarray
    up_bias: np.ndarray
    down_bias: np.ndarray
    down_norms: np.ndarray = NO_NORMS


class DenseFfnScratch(NamedTuple):
    """Work space for requests of up to T tokens.

    gates, ups (T * N,) float32; inputs: quantized activations; counters of blocks taken
    Of one token: fired_ids (N,) int32, fired_masks (N,) uint32, fired (N,) float32, in each
    thread's range: neurons that pass thresholds, and their values
    counts, up_counts (threads,) int64: neurons that contribute, and those whose up row was read
    """

    gates: np.ndarray
    ups: np.ndarray
    fired_ids: np.ndarray
    fired_masks: np.ndarray
    fired: np.ndarray
    counts: np.ndarray
    up_counts: np.ndarray
    inputs: QuantizedVectors
    counters: np.ndarray
    num_tokens: int


def new_dense_scratch(
    num_threads: int, num_tokens: int, num_neurons: int, width: int
) -> DenseFfnScratch:
    """Work space for requests of up to `num_tokens` tokens."""
    return DenseFfnScratch(
        gates=np.zeros(num_tokens * num_neurons, np.float32),
        ups=np.zeros(num_tokens * num_neurons, np.float32),
        fired_ids=np.zeros(num_neurons, np.int32),
        fired_masks=np.zeros(num_neurons, np.uint32),
        fired=np.zeros(num_neurons, np.float32),
        counts=np.zeros(num_threads, np.int64),
        up_counts=np.zeros(num_threads, np.int64),
        inputs=empty_vectors(num_threads, num_tokens, max(num_neurons, width)),
        counters=new_block_counters(_NUM_COUNTERS, num_threads),
        num_tokens=num_tokens,
    )


@njit(nogil=True, cache=True)
def _by_token(values, num_tokens, num_neurons):
    """The flat `values` as (T, N)."""
    return values[: num_tokens * num_neurons].reshape(num_tokens, num_neurons)


@njit(nogil=True, cache=True)
def _activate(first, last, function, has_up, thresholds, down_norms, gates, ups):
    """gates[t, n] = fn(gates[t, n]) * ups[t, n] for neurons first..last-1, 0 below a threshold.

    Returns how many neurons contribute to some token, and how many need their up row.
    """
    num_fired = num_up = 0
    for n in range(first, last):
        fires = needs_up = False
        for t in range(gates.shape[0]):
            value = activate(function, gates[t, n])
            is_kept = passes(value, thresholds.gate)
            needs_up |= is_kept
            if is_kept and has_up:
                value *= activate_up(function, ups[t, n])
                is_kept = passes(contribution(value, down_norms, n), thresholds.product)
            fires |= is_kept
            gates[t, n] = value if is_kept else np.float32(0)
        num_fired += fires
        num_up += needs_up
    return num_fired, num_up


@njit(nogil=True, cache=True)
def _activate_some(first, last, function, thresholds, up, up_bias, down_norms, x, gates, scratch):
    """`_activate` of one token that reads only the up rows whose gates pass."""
    ids, fired = scratch.fired_ids[first:last], scratch.fired[first:last]
    for n in range(first, last):
        gates[n] = activate(function, gates[n])
    num_up = keep_fired_kernel(
        NO_IDS, NO_MASKS, thresholds.gate, first, last, gates[first:last], ids,
        scratch.fired_masks[first:last], fired,
    )  # fmt: skip
    scale_by_up(up, up_bias, ids, num_up, x, function, fired)
    num_fired = num_up
    if thresholds.product >= 0:
        num_fired = drop_small(ids, num_up, fired, down_norms, thresholds.product)
    gates[first:last] = 0
    for i in range(num_fired):
        gates[ids[i]] = fired[i]
    return num_fired, num_up


@njit(nogil=True, cache=True)
def dense_layer_ffn(
    thread, num_threads, cells, service, layer, thresholds, x, arrays, scratch, function, out
):  # fmt: skip
    """out = the layer's FFN of x (T, d): this thread's part; checks nothing.

    All of a service's threads call it. They wait for each other after the gates and ups, and after
    the neurons' values. `out` is complete when all have returned; until then none may start another
    request, and scratch.counters have to be zero at its start.
    """
    begin, end = arrays.offsets[layer], arrays.offsets[layer + 1]
    gate, has_up, none = arrays.gate[begin:end], arrays.up.shape[0] > 0, x[:0]
    up = arrays.up[begin:end] if has_up else arrays.up
    gates = _by_token(scratch.gates, x.shape[0], end - begin)
    ups = _by_token(scratch.ups, x.shape[0], end - begin)
    vectors = quantize_activations(gate, x, scratch.inputs, thread)
    up_bias = part_of(arrays.up_bias, begin, end)
    down_norms = part_of(arrays.down_norms, begin, end)
    work_stealing_rows(
        scratch.counters[_GATE], thread, num_threads, gate, part_of(arrays.gate_bias, begin, end),
        vectors, none, gates, 0,
    )  # fmt: skip
    some_ups = has_up and x.shape[0] == 1 and thresholds.gate >= 0
    if has_up and not some_ups:
        work_stealing_rows(
            scratch.counters[_UP], thread, num_threads, up, up_bias, vectors, none, ups, 0
        )
    barrier_wait(cells, service, num_threads)
    first, last = split_range(end - begin, thread, num_threads, _GROUP)
    if some_ups:
        counts = _activate_some(
            first, last, function, thresholds, up, up_bias, down_norms, vectors, gates[0], scratch
        )
    else:
        counts = _activate(first, last, function, has_up, thresholds, down_norms, gates, ups)
    scratch.counts[thread], scratch.up_counts[thread] = counts
    barrier_wait(cells, service, num_threads)
    work_stealing_layer(
        scratch.counters[_DOWN : _DOWN_SECOND + 1], thread, num_threads, arrays.down, layer,
        arrays.down_bias[layer], gates, scratch.inputs, none, out,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _count(service, layer, first, buckets, gates, is_all, buffers):
    """Count in the arena the neurons that contribute to some token, and the gates computed: all.

    A neuron contributes where its value in `gates` is not zero, or always (`is_all`).
    """
    counts, bucket_of = buffers.neuron_counts[service, layer], buckets.bucket[first:]
    for bucket in range(counts.shape[0]):
        every = buckets.sizes[layer, bucket]
        counts[bucket, LAST_GATES] = every
        counts[bucket, LAST_FIRED] = every if is_all else np.uint32(0)
    if not is_all:
        for n in range(gates.shape[1]):
            fires = False
            for t in range(gates.shape[0]):
                fires |= gates[t, n] != 0
            counts[bucket_of[n], LAST_FIRED] += np.uint32(fires)
    for bucket in range(counts.shape[0]):
        counts[bucket, ALL_FIRED] += counts[bucket, LAST_FIRED]
        counts[bucket, ALL_GATES] += counts[bucket, LAST_GATES]
    buffers.counted_steps[service, layer] += np.uint32(1)


@njit(nogil=True, cache=True)
def serve_dense_ffn(
    thread, num_threads, service, seen, buffers, arrays, scratch, buckets, function
):
    """`numba_kernels.serve.serve_ffn.serve_ffn` of a dense shard.

    It also returns for requests that list neurons, which Python refuses.
    """
    request, reply = buffers.requests[service], buffers.replies[service]
    while True:
        number = next_request(buffers.cells, service, seen)
        started = now_ns()
        num_tokens = request[NUM_TOKENS]
        is_own = request[OPERATION] == FFN and request[NUM_IDS] < 0
        if is_own and num_tokens <= scratch.num_tokens:
            layer, thresholds = request[LAYER], read_thresholds(request)
            dense_layer_ffn(
                thread, num_threads, buffers.cells, service, layer, thresholds,
                buffers.ffn_input[:num_tokens], arrays, scratch, function,
                buffers.partials[service, :num_tokens],
            )  # fmt: skip
            if thread == 0:
                first, last = arrays.offsets[layer], arrays.offsets[layer + 1]
                reply[NUM_COMPUTED], reply[NUM_UP] = scratch.counts.sum(), scratch.up_counts.sum()
                if request[WATCHED]:
                    gates = _by_token(scratch.gates, num_tokens, last - first)
                    is_all = thresholds.gate < 0 and thresholds.product < 0
                    _count(service, layer, first, buckets, gates, is_all, buffers)
        elif request[OPERATION] != PING:
            return number
        finish_request(
            buffers.cells, buffers.replies, scratch.counters, service, number, num_threads, started
        )
        seen = number
