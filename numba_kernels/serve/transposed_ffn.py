"""Neurons in memory whose down projection is transposed: their steps of `layer_ffn`.

Without a predictor the down projection can stay as files have it, a row for each output, in their
format; a row per neuron would have to be quantized again. These rows are read whole, and
multiplied with zeros where neurons do not fire.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.ffn import by_neuron
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.layer_rows import LayerRows
from hotcold.numba_kernels.serve.ffn_rows import (
    DOWN,
    DOWN_SECOND,
    NO_NORMS,
    FfnArrays,
    FfnScratch,
    part_of,
    scratch_of,
    set_bias,
)
from hotcold.numba_kernels.serve.work_stealing import work_stealing_layer

_GROUP = 16  # neurons of a cache line


class TransposedArrays(NamedTuple):
    """`FfnArrays` with N neurons in each layer; down: d rows a layer, of N weights each.

    down_norms: norms of down's columns
    """

    starts: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: LayerRows
    gate_bias: np.ndarray
    up_bias: np.ndarray
    down_bias: np.ndarray
    down_norms: np.ndarray = NO_NORMS


def new_transposed_scratch(
    num_threads: int, num_tokens: int, num_neurons: int, width: int, num_blocks: int = 1
) -> FfnScratch:
    """`new_scratch` for `TransposedArrays` with `num_neurons` a layer."""
    sums = np.zeros((1, num_tokens, num_neurons), np.float32)
    return scratch_of(sums, num_threads, num_neurons, num_blocks, max(num_neurons, width))


@njit(nogil=True, cache=True)
def layer_rows(arrays, layer):
    """`FfnArrays` of one layer, but for down rows."""
    starts = arrays.starts[layer]
    first, last = starts[0], starts[starts.shape[0] - 1]
    return FfnArrays(
        arrays.starts,
        arrays.gate[first:last],
        part_of(arrays.up, first, last),
        arrays.down,
        part_of(arrays.gate_bias, first, last),
        part_of(arrays.up_bias, first, last),
        arrays.down_bias,
        part_of(arrays.down_norms, first, last),
    )


@njit(nogil=True, cache=True)
def clear(source, share, scratch):
    """The thread's part of what down rows are multiplied with is zero."""
    begin, end = split_range(scratch.sums.shape[2], share.thread, share.num_threads, _GROUP)
    scratch.sums[0, : share.x.shape[0], begin:end] = 0


@njit(nogil=True, cache=True)
def add(source, share, scratch, places):
    """Bring the products of what fired into the order of down's columns."""
    num_tokens = share.x.shape[0]
    gates, h = by_neuron(share.gates, num_tokens), scratch.sums[0]
    for i in range(scratch.counts[share.thread]):
        for t in range(num_tokens):
            h[t, places[i]] = gates[i, t]


@njit(nogil=True, cache=True)
def add_up(source, share, scratch):
    """out = down . h and the biases, in rows that threads share by work stealing."""
    out, rows, layer = share.out, share.rows, share.layer
    num_tokens, biases, none = out.shape[0], rows.down_bias[layer], rows.down_norms[:0]
    addend = np.empty((num_tokens if biases.shape[1] else 0, out.shape[1]), np.float32)
    if biases.shape[1]:
        set_bias(share.selection.block_weights, biases, addend, 0, out.shape[1])
    work_stealing_layer(
        scratch.counters[DOWN : DOWN_SECOND + 1], share.thread, share.num_threads, rows.down, layer,
        none, scratch.sums[0, :num_tokens], scratch.inputs, addend, out,
    )  # fmt: skip
