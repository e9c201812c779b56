"""Neurons in memory, each with its own rows: their arrays, and their steps of `layer_ffn`.

A neuron that does not fire costs its gate row. A gate's dot product does not depend on the thread
that computes it, so gates are shared by work stealing, and with them up rows where all neurons are
kept. Sums depend on their order: each thread sums its own neurons, and the threads' sums are added
in order.
"""

from typing import Any, NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import Activation, Thresholds
from hotcold.numba_kernels.decode.batch_ffn import (
    TokenLists,
    add_some_kernel,
    are_all,
    block_size,
    empty_lists,
    first_of_rows,
    gather,
    products_kernel,
    scale_some_kernel,
)
from hotcold.numba_kernels.decode.candidates import (
    NUM_SPAN_NUMBERS,
    TOKENS,
    own_part,
    shift_of,
)
from hotcold.numba_kernels.decode.ffn import (
    add_one,
    by_neuron,
    gate_values_kernel,
    scale_by_up,
)
from hotcold.numba_kernels.decode.rows import add_in_order, split_range
from hotcold.numba_kernels.decode.selection import Selection
from hotcold.numba_kernels.decode.vectors import QuantizedVectors, empty_vectors
from hotcold.numba_kernels.ffn_arrays import FfnArrays
from hotcold.numba_kernels.formats import CHUNK, whole_chunks
from hotcold.numba_kernels.serve.work_stealing import block_rows, new_block_counters, next_block

# kinds of work that threads share in a request; down rows only where they are transposed
GATES, UPS, DOWN = range(3)
_NUM_KINDS = 3


class FfnScratch(NamedTuple):
    """Work space for requests of up to T tokens and N candidates.

    sums (threads, T, d in whole chunks); transposed (1, T, N): numbers that down rows are
    multiplied with
    values, ups (T * N,) float32: of candidates in order, gates and up . x
    fired_ids (N,) int32, fired_masks (N,) uint32, gates (T * N,) float32: neurons that fired, those
    of thread t from firsts[t] on; firsts, counts, up_counts (threads,) int64: counts of neurons
    that fired, and of up rows read; spans (threads, B, 7) int64: of `decode.candidates`
    lists: each token's neurons; inputs: quantized activations; counters (kinds, threads * 16) int32
    of blocks taken
    """

    sums: np.ndarray
    values: np.ndarray
    ups: np.ndarray
    fired_ids: np.ndarray
    fired_masks: np.ndarray
    gates: np.ndarray
    firsts: np.ndarray
    counts: np.ndarray
    up_counts: np.ndarray
    spans: np.ndarray
    lists: TokenLists
    inputs: QuantizedVectors
    counters: np.ndarray


def scratch_of(
    sums: np.ndarray, num_threads: int, num_candidates: int, num_blocks: int, width: int,
    input_width: int,
) -> FfnScratch:  # fmt: skip
    """Work space whose `sums` (…, T, …) are given; vectors of up to `input_width` are quantized."""
    num_tokens = sums.shape[1]
    return FfnScratch(
        sums=sums,
        values=np.zeros(num_tokens * num_candidates, np.float32),
        ups=np.zeros(num_tokens * num_candidates, np.float32),
        fired_ids=np.zeros(num_candidates, np.int32),
        fired_masks=np.zeros(num_candidates, np.uint32),
        gates=np.zeros(num_tokens * num_candidates, np.float32),
        firsts=np.zeros(num_threads, np.int64),
        counts=np.zeros(num_threads, np.int64),
        up_counts=np.zeros(num_threads, np.int64),
        spans=np.zeros((num_threads, num_blocks, NUM_SPAN_NUMBERS), np.int64),
        lists=empty_lists(num_threads, num_tokens, width),
        inputs=empty_vectors(num_threads, num_tokens, input_width),
        counters=new_block_counters(_NUM_KINDS, num_threads),
    )


def new_scratch(
    num_threads: int, num_tokens: int, num_candidates: int, width: int, num_blocks: int = 1
) -> FfnScratch:
    """Work space for requests of up to `num_tokens` tokens and `num_candidates` neurons."""
    sums = np.zeros((num_threads, num_tokens, whole_chunks(width)), np.float32)
    return scratch_of(sums, num_threads, num_candidates, num_blocks, width, width)


class Share(NamedTuple):
    """A thread's share of a request of T tokens.

    cells of `SharedBuffers`; x (T, d) float32, `vectors` the same as gate rows take them
    spans: the candidates, of `decode.candidates`
    rows: `FfnArrays` of this layer alone; of offloaded neurons with matrices by slot
    fired_ids, fired_masks, flat_gates: the thread's part of `FfnScratch`; gates (N, T) the same
    places: of up and down rows, once `find_fired` has found them; lists: work space
    out (T, d) float32: the layer's output
    """

    thread: int
    num_threads: int
    cells: np.ndarray
    service: int
    layer: int
    selection: Selection
    spans: np.ndarray
    thresholds: Thresholds
    function: Activation
    x: np.ndarray
    vectors: Any
    rows: Any
    fired_ids: np.ndarray
    places: np.ndarray
    fired_masks: np.ndarray
    flat_gates: np.ndarray
    gates: np.ndarray
    lists: TokenLists
    out: np.ndarray


@njit(nogil=True, cache=True)
def part_of(array, first, last):
    """array[first:last], or the empty array."""
    return array[first:last] if array.shape[0] else array


@njit(nogil=True, cache=True)
def layer_span(arrays, layer):
    """First and last row of a layer."""
    starts = arrays.starts[layer]
    return starts[0], starts[starts.shape[0] - 1]


@njit(nogil=True, cache=True, inline="always")
def with_matrices(arrays, layer, gate, up, down):
    """These matrices with biases and norms of one layer."""
    first, last = layer_span(arrays, layer)
    return FfnArrays(
        arrays.starts,
        gate,
        up,
        down,
        part_of(arrays.gate_bias, first, last),
        part_of(arrays.up_bias, first, last),
        arrays.down_bias,
        part_of(arrays.down_norms, first, last),
    )


@njit(nogil=True, cache=True, inline="always")
def layer_rows(source, layer):
    """`FfnArrays` of one layer."""
    first, last = layer_span(source, layer)
    up, down = part_of(source.up, first, last), source.down[first:last]
    return with_matrices(source, layer, source.gate[first:last], up, down)


@njit(nogil=True, cache=True)
def take_products(
    counters, thread, num_threads, num_tokens, width, selection, spans, weights, bias, places, x,
    function, activates, values, lists,
):  # fmt: skip
    """`share_products` without a `Share`: to pass one takes longer than a short row."""
    products, activates_one = by_neuron(values, num_tokens), False
    size, masks = block_size(weights, num_tokens), selection.token_masks
    if num_tokens == 1:
        size, activates_one = block_rows(weights), activates
    for turn in range(num_threads):
        part = (thread + turn) % num_threads
        taken, passed = next_block(counters, part), 0  # of this part's blocks, span after span
        for span in spans:
            first, last = own_part(span, selection, part, num_threads)
            shift, tokens = shift_of(span), np.uint32(span[TOKENS])
            count = (last - first + size - 1) // size
            is_gathered = are_all(tokens, num_tokens)
            while taken < passed + count:
                begin = first + (taken - passed) * size
                end = min(begin + size, last)
                if activates_one:
                    gate_values_kernel(
                        weights, bias, places, shift, x, function, begin, end, last,
                        values[begin:end],
                    )  # fmt: skip
                else:
                    row = first_of_rows(places, masks, shift, begin, end)
                    if row >= 0 and not is_gathered:
                        gather(x, tokens, width, lists)
                        is_gathered = True
                    products_kernel(
                        weights, places, masks, tokens, row, x, width, begin, end,
                        products[begin:end], lists,
                    )  # fmt: skip
                taken = next_block(counters, part)
            passed += count


@njit(nogil=True, cache=True, inline="always")
def share_products(counters, share, weights, bias, places, activates, values):
    """values of the candidates in the blocks that this thread takes, by work stealing.

    weights . x, (N, T); one token's fn(weights . x + bias) with `activates`. Candidate i's row is
    places[i], or row i of the chosen blocks where `places` is empty.
    """
    take_products(
        counters, share.thread, share.num_threads, share.x.shape[0], share.x.shape[1],
        share.selection, share.spans, weights, bias, places, share.vectors, share.function,
        activates, values, share.lists,
    )  # fmt: skip


# The steps of `numba_kernels.ffn.layer_ffn`, in order.


@njit(nogil=True, cache=True, inline="always")
def begin(source, share, scratch):
    """Nothing has to be read."""
    return True


@njit(nogil=True, cache=True, inline="always")
def clear(source, share, scratch):
    """The thread's sums are zero."""
    scratch.sums[share.thread, : share.x.shape[0]] = 0


@njit(nogil=True, cache=True, inline="always")
def compute_gates(source, share, scratch):
    """Gates of all candidates, and up products too where all of them are kept."""
    rows, selection = share.rows, share.selection
    share_products(
        scratch.counters[GATES], share, rows.gate, rows.gate_bias, selection.ids, True,
        scratch.values,
    )  # fmt: skip
    has_ups = share.thresholds.gate < 0 and not selection.is_listed and rows.up.shape[0] > 0
    if has_ups:
        share_products(
            scratch.counters[UPS], share, rows.up, rows.up_bias, selection.ids, False, scratch.ups
        )
    return has_ups


@njit(nogil=True, cache=True, inline="always")
def is_well(source, share, scratch):
    """Nothing was read that could have failed."""
    return True


@njit(nogil=True, cache=True, inline="always")
def places(source, fired_ids, first):
    """Where up and down rows of the thread's neurons that fired are: their numbers in the layer."""
    return fired_ids


@njit(nogil=True, cache=True, inline="always")
def find_fired(source, share, scratch):
    """Nothing has to be looked up."""


@njit(nogil=True, cache=True, inline="always")
def scale(source, share, scratch):
    """Multiply the gates of what fired by up . x + bias."""
    rows, num_fired = share.rows, scratch.counts[share.thread]
    if rows.up.shape[0]:
        if share.x.shape[0] == 1:
            scale_by_up(
                rows.up, rows.up_bias, share.fired_ids, share.places, num_fired, share.vectors,
                share.function, share.flat_gates,
            )  # fmt: skip
        else:
            scale_some_kernel(
                rows.up, rows.up_bias, share.fired_ids, share.places, share.fired_masks,
                share.spans, share.gates, share.vectors, share.x.shape[1], share.function,
                share.lists,
            )  # fmt: skip


@njit(nogil=True, cache=True, inline="always")
def add(source, share, scratch):
    """Add down rows to the thread's sums, in order."""
    down, num_fired = share.rows.down, scratch.counts[share.thread]
    sums = scratch.sums[share.thread, : share.x.shape[0]]
    if share.x.shape[0] == 1:
        add_one(down, share.places, num_fired, share.flat_gates, sums[0])
    else:
        add_some_kernel(
            down, share.places, share.fired_masks, num_fired, share.gates, sums, share.lists
        )  # fmt: skip


@njit(nogil=True, cache=True)
def set_bias(block_weights, biases, out, begin, end):
    """out[t, begin:end] = the sum of the blocks' `biases` (B, d or 0), each with its factor."""
    out[:, begin:end] = 0
    if biases.shape[1] == 0:
        return
    for t in range(out.shape[0]):
        for block in range(biases.shape[0]):
            factor = block_weights[t, block] if block_weights.shape[0] else np.float32(1)
            if factor != 0:
                for i in range(begin, end):
                    out[t, i] += factor * biases[block, i]


@njit(nogil=True, cache=True, inline="always")
def add_up(source, share, scratch):
    """out = all threads' sums and the biases, in this thread's range of columns."""
    out, sums = share.out, scratch.sums
    begin, end = split_range(out.shape[1], share.thread, share.num_threads, CHUNK)
    set_bias(share.selection.block_weights, share.rows.down_bias[share.layer], out, begin, end)
    for t in range(out.shape[0]):
        total = sums[0, t, begin : begin + (end - begin + CHUNK - 1) // CHUNK * CHUNK]
        for other in range(1, share.num_threads):
            part = sums[other, t, begin : begin + total.shape[0]]
            for i in range(total.shape[0]):
                total[i] += part[i]
        add_in_order(share.rows.down, sums[0, t], out[t], begin, end)


@njit(nogil=True, cache=True, inline="always")
def note_reads(source, reply):
    """Nothing was read."""
