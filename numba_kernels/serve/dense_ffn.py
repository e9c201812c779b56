"""A layer's feed-forward network where every neuron is always computed, by a service's threads.

Nothing is skipped, so the down projection may lie as files have it: a row for each output, in their
own format, where neurons of their own (`numba_kernels.serve.layer_ffn`) would have to be quantized
again. Each matrix is one stream that threads share by work stealing; a row's product is the same
whichever thread computes it.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from numba_kernels.decode.activations import activate, activate_up
from numba_kernels.decode.rows import split_range
from numba_kernels.decode.vectors import QuantizedVectors, empty_vectors, prepared
from numba_kernels.layer_rows import LayerRows
from numba_kernels.serve.doorbell import now_ns
from numba_kernels.serve.layer_ffn import part_of
from numba_kernels.serve.mailbox import (
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
    finish_request,
    meet,
    next_request,
    read_thresholds,
)
from numba_kernels.serve.work_stealing import (
    new_block_counters,
    work_stealing_layer,
    work_stealing_rows,
)

_GATE, _UP, _DOWN, _DOWN_SECOND = range(4)
_NUM_COUNTERS = 4
_GROUP = 16  # neurons, whose values one thread writes


class DenseFfnArrays(NamedTuple):
    """A run of neurons, the same of every layer: layer l has rows offsets[l]:offsets[l + 1].

    offsets (L + 1,) int64; gate, up (L * N, d) weights, up (0, d) in a two-matrix FFN; down: d rows
    a layer, of N weights each; gate_bias, up_bias (L * N,) or (0,), down_bias (L, d) or (L, 0)
    float32
    """

    offsets: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: LayerRows
    gate_bias: np.ndarray
    up_bias: np.ndarray
    down_bias: np.ndarray


class DenseFfnScratch(NamedTuple):
    """Work space: gates, ups (T * N,) float32, the inputs of products quantized, for quantized
    weights, and counters of the blocks taken. T is the most tokens of one request."""

    gates: np.ndarray
    ups: np.ndarray
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
        inputs=empty_vectors(num_threads, num_tokens, max(num_neurons, width)),
        counters=new_block_counters(_NUM_COUNTERS, num_threads),
        num_tokens=num_tokens,
    )


@njit(nogil=True, cache=True)
def _by_token(values, num_tokens, num_neurons):
    """The flat `values` as (T, N)."""
    return values[: num_tokens * num_neurons].reshape(num_tokens, num_neurons)


@njit(nogil=True, cache=True)
def _activate(first, last, function, has_up, gates, ups):
    """gates[t, n] = fn(gates[t, n]) * ups[t, n] for neurons first..last-1."""
    for t in range(gates.shape[0]):
        for n in range(first, last):
            value = activate(function, gates[t, n])
            if has_up:
                value *= activate_up(function, ups[t, n])
            gates[t, n] = value


@njit(nogil=True, cache=True)
def dense_layer_ffn(
    thread, num_threads, cells, service, layer, x, arrays, scratch, function, out
):  # fmt: skip
    """out = the layer's FFN of x (T, d): this thread's part of the work; checks nothing.

    All of a service's threads call it; they meet when products with gates and ups are there, and
    again when neurons' values are. `out` is complete when all have returned; until then none may
    begin another request, and before that scratch.counters have to be zero again.
    """
    begin, end = arrays.offsets[layer], arrays.offsets[layer + 1]
    gate, has_up, none = arrays.gate[begin:end], arrays.up.shape[0] > 0, x[:0]
    gates = _by_token(scratch.gates, x.shape[0], end - begin)
    ups = _by_token(scratch.ups, x.shape[0], end - begin)
    vectors = prepared(gate, x, scratch.inputs, thread)
    work_stealing_rows(
        scratch.counters[_GATE], thread, num_threads, gate, part_of(arrays.gate_bias, begin, end),
        vectors, none, gates, np.int64(0),
    )  # fmt: skip
    if has_up:
        work_stealing_rows(
            scratch.counters[_UP], thread, num_threads, arrays.up[begin:end],
            part_of(arrays.up_bias, begin, end), vectors, none, ups, np.int64(0),
        )  # fmt: skip
    meet(cells, service, num_threads)
    first, last = split_range(end - begin, thread, num_threads, _GROUP)
    _activate(first, last, function, has_up, gates, ups)
    meet(cells, service, num_threads)
    work_stealing_layer(
        scratch.counters[_DOWN : _DOWN_SECOND + 1], thread, num_threads, arrays.down, layer,
        arrays.down_bias[layer], gates, scratch.inputs, none, out,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _count_all(service, layer, buckets, wires):
    """Count in the arena that all neurons of the layer have been computed."""
    counts = wires.neuron_counts[service, layer]
    for bucket in range(counts.shape[0]):
        every = buckets.sizes[layer, bucket]
        counts[bucket, LAST_GATES] = counts[bucket, LAST_FIRED] = every
        counts[bucket, ALL_FIRED] += every
        counts[bucket, ALL_GATES] += every
    wires.counted_steps[service, layer] += np.uint32(1)


@njit(nogil=True, cache=True)
def computes_all(request):
    """Whether an FFN request (words,) wants all neurons, whatever their activation."""
    told = read_thresholds(request)
    return request[NUM_IDS] < 0 and told.gate < 0 and told.product < 0


@njit(nogil=True, cache=True)
def serve_dense_ffn(thread, num_threads, service, seen, wires, arrays, scratch, buckets, function):
    """`numba_kernels.serve.serve_ffn.serve_ffn` of neurons that are all computed.

    Requests that choose among them are Python's, which refuses them.
    """
    request, reply = wires.requests[service], wires.replies[service]
    while True:
        number = next_request(wires.cells, service, seen)
        started = now_ns()
        num_tokens = request[NUM_TOKENS]
        is_own = request[OPERATION] == FFN and computes_all(request)
        if is_own and num_tokens <= scratch.num_tokens:
            layer = request[LAYER]
            dense_layer_ffn(
                thread, num_threads, wires.cells, service, layer, wires.ffn_input[:num_tokens],
                arrays, scratch, function, wires.partials[service, :num_tokens],
            )  # fmt: skip
            if thread == 0:
                count = arrays.offsets[layer + 1] - arrays.offsets[layer]
                reply[NUM_COMPUTED] = reply[NUM_UP] = count
                if request[WATCHED]:
                    _count_all(service, layer, buckets, wires)
        elif request[OPERATION] != PING:
            return number
        finish_request(
            wires.cells, wires.replies, scratch.counters, service, number, num_threads, started
        )
        seen = number
