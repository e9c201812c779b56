"""Neurons in memory whose down projection is transposed: their steps of `layer_ffn`.

Without a predictor the down projection can stay as files have it, a row for each output, in their
format; a row per neuron would have to be quantized again. These rows are read whole, and
multiplied with zeros where neurons do not fire.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.ffn.in_memory import (
    DOWN,
    DOWN_SECOND,
    FfnScratch,
    layer_span,
    part_of,
    scratch_of,
    set_bias,
    with_matrices,
)
from hotcold.numba_kernels.serve.work_stealing import work_stealing_layer

_GROUP = 16  # neurons of a cache line


def new_transposed_scratch(
    num_threads: int, num_tokens: int, num_neurons: int, width: int, num_blocks: int = 1
) -> FfnScratch:
    """`new_scratch` for `TransposedArrays` with `num_neurons` a layer."""
    sums = np.zeros((1, num_tokens, num_neurons), np.float32)
    return scratch_of(sums, num_threads, num_neurons, num_blocks, max(num_neurons, width))


@njit(nogil=True, cache=True, inline="always")
def layer_rows(source, layer):
    """`FfnArrays` of one layer, but for down rows: all."""
    first, last = layer_span(source, layer)
    up = part_of(source.up, first, last)
    return with_matrices(source, layer, source.gate[first:last], up, source.down)


@njit(nogil=True, cache=True, inline="always")
def clear(source, share, scratch):
    """The thread's part of what down rows are multiplied with is zero."""
    begin, end = split_range(scratch.sums.shape[2], share.thread, share.num_threads, _GROUP)
    scratch.sums[0, : share.x.shape[0], begin:end] = 0


@njit(nogil=True, cache=True, inline="always")
def add(source, share, scratch):
    """Bring the products of what fired into the order of down's columns."""
    gates, fired_ids, h = share.gates, share.fired_ids, scratch.sums[0]
    for i in range(scratch.counts[share.thread]):
        for t in range(gates.shape[1]):
            h[t, fired_ids[i]] = gates[i, t]


@njit(nogil=True, cache=True, inline="always")
def add_up(source, share, scratch):
    """out = down . h and the biases, in rows that threads share by work stealing."""
    out, rows, layer = share.out, share.rows, share.layer
    num_tokens, biases, addend = out.shape[0], rows.down_bias[layer], out[:0]
    bias = biases[0]
    if biases.shape[1] and (biases.shape[0] > 1 or share.selection.block_weights.shape[0]):
        bias, addend = biases[0, :0], np.empty(out.shape, np.float32)
        set_bias(share.selection.block_weights, biases, addend, 0, out.shape[1])
    work_stealing_layer(
        scratch.counters[DOWN : DOWN_SECOND + 1], share.thread, share.num_threads, rows.down, layer,
        bias, scratch.sums[0, :num_tokens], scratch.inputs, addend, out,
    )  # fmt: skip
