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
    block_size,
    empty_lists,
    products_kernel,
    scale_some_kernel,
)
from hotcold.numba_kernels.decode.candidates import (
    FIRST,
    NUM_SPAN_NUMBERS,
    ROW,
    TOKENS,
    own_part,
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
from hotcold.numba_kernels.formats import CHUNK, whole_chunks
from hotcold.numba_kernels.serve.work_stealing import block_rows, new_block_counters, next_block

MAX_TOKENS = 32  # of a request: bits of a mask
NO_NORMS = np.empty(0, np.float32)
# kinds of work that threads share in a request; down rows only where they are transposed
GATES, UPS, DOWN, DOWN_SECOND = range(4)
_NUM_KINDS = 4


class FfnArrays(NamedTuple):
    """A shard of cold neurons, all layers stacked, each layer in B blocks.

    starts (L, B + 1) int64: block b of layer l has rows starts[l, b]:starts[l, b + 1], and layers
    follow each other; gate, up, down (N, d) weights, up (0, d) in a two-matrix FFN;
    gate_bias, up_bias (N,) or (0,), down_bias (L, B, d) or (L, B, 0) float32;
    down_norms (N,) or (0,) float32: norms of the down rows, for product thresholds
    """

    starts: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    gate_bias: np.ndarray
    up_bias: np.ndarray
    down_bias: np.ndarray
    down_norms: np.ndarray = NO_NORMS


def most_rows(starts: np.ndarray) -> int:
    """Rows of the largest layer."""
    return int((starts[:, -1] - starts[:, 0]).max(initial=0))


class FfnScratch(NamedTuple):
    """Work space for requests of up to T tokens and N candidates.

    sums (threads, T, d in whole chunks); transposed (1, T, N): what down rows are multiplied with
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
    sums: np.ndarray, num_threads: int, num_candidates: int, num_blocks: int, input_width: int
) -> FfnScratch:
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
        lists=empty_lists(num_threads, num_tokens),
        inputs=empty_vectors(num_threads, num_tokens, input_width),
        counters=new_block_counters(_NUM_KINDS, num_threads),
    )


def new_scratch(
    num_threads: int, num_tokens: int, num_candidates: int, width: int, num_blocks: int = 1
) -> FfnScratch:
    """Work space for requests of up to `num_tokens` tokens and `num_candidates` neurons."""
    sums = np.zeros((num_threads, num_tokens, whole_chunks(width)), np.float32)
    return scratch_of(sums, num_threads, num_candidates, num_blocks, width)


class Share(NamedTuple):
    """A thread's share of a request of T tokens.

    cells of `SharedBuffers`; x (T, d) float32, `vectors` the same as gate rows take them
    spans: the candidates, of `decode.candidates`
    rows: `FfnArrays` of this layer alone; of offloaded neurons with matrices by slot
    fired_ids, fired_masks, gates: the thread's part of `FfnScratch`; lists: work space
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
    fired_masks: np.ndarray
    gates: np.ndarray
    lists: TokenLists
    out: np.ndarray


@njit(nogil=True, cache=True)
def part_of(array, first, last):
    """array[first:last], or the empty array."""
    return array[first:last] if array.shape[0] else array


@njit(nogil=True, cache=True)
def layer_rows(arrays, layer):
    """`FfnArrays` whose rows and biases are one layer's."""
    starts = arrays.starts[layer]
    first, last = starts[0], starts[starts.shape[0] - 1]
    return FfnArrays(
        arrays.starts,
        arrays.gate[first:last],
        part_of(arrays.up, first, last),
        arrays.down[first:last],
        part_of(arrays.gate_bias, first, last),
        part_of(arrays.up_bias, first, last),
        arrays.down_bias,
        part_of(arrays.down_norms, first, last),
    )


@njit(nogil=True, cache=True)
def work_stealing_products(counters, share, weights, bias, places, activates, values):
    """values of the candidates in the blocks that this thread takes.

    weights . x, (N, T); one token's fn(weights . x + bias) with `activates`. Candidate i's row is
    places[i], or row i of the chosen blocks where `places` is empty.
    """
    num_threads, num_tokens, selection = share.num_threads, share.x.shape[0], share.selection
    products, x, activates_one = by_neuron(values, num_tokens), share.vectors, False
    size = block_size(weights, num_tokens)
    if num_tokens == 1:
        size, activates_one = block_rows(weights), activates
    for turn in range(num_threads):
        part = (share.thread + turn) % num_threads
        taken, passed = next_block(counters, part), 0  # of this part's blocks, span after span
        for span in share.spans:
            first, last = own_part(span, selection, part, num_threads)
            shift, tokens = span[ROW] - span[FIRST], np.uint32(span[TOKENS])
            count = (last - first + size - 1) // size
            while taken < passed + count:
                begin = first + (taken - passed) * size
                end = min(begin + size, last)
                if activates_one:
                    gate_values_kernel(
                        weights, bias, places, shift, x, share.function, begin, end, last,
                        values[begin:end],
                    )  # fmt: skip
                else:
                    products_kernel(
                        weights, places, selection.token_masks, tokens, shift, x, begin, end,
                        products[begin:end], share.lists,
                    )  # fmt: skip
                taken = next_block(counters, part)
            passed += count


# The steps of `numba_kernels.serve.layer_ffn`, in order.


@njit(nogil=True, cache=True)
def begin(source, share, scratch):
    """Nothing has to be read."""
    return True


@njit(nogil=True, cache=True)
def clear(source, share, scratch):
    """The thread's sums are zero."""
    scratch.sums[share.thread, : share.x.shape[0]] = 0


@njit(nogil=True, cache=True)
def compute_gates(source, share, scratch):
    """Gates of all candidates, and up products too where all of them are kept."""
    rows, selection = share.rows, share.selection
    work_stealing_products(
        scratch.counters[GATES], share, rows.gate, rows.gate_bias, selection.ids, True,
        scratch.values,
    )  # fmt: skip
    has_ups = share.thresholds.gate < 0 and not selection.is_listed and rows.up.shape[0] > 0
    if has_ups:
        work_stealing_products(
            scratch.counters[UPS], share, rows.up, rows.up_bias, selection.ids, False, scratch.ups
        )
    return has_ups


@njit(nogil=True, cache=True)
def is_well(source, share, scratch):
    """Nothing was read that could have failed."""
    return True


@njit(nogil=True, cache=True)
def find_fired(source, share, scratch):
    """Where up and down rows of the thread's neurons that fired are: their numbers in the layer."""
    return share.fired_ids


@njit(nogil=True, cache=True)
def scale(source, share, scratch, places):
    """Multiply the gates of what fired by up . x + bias."""
    rows, ids, num_fired = share.rows, share.fired_ids, scratch.counts[share.thread]
    if rows.up.shape[0] == 0:
        return
    if share.x.shape[0] == 1:
        scale_by_up(
            rows.up, rows.up_bias, ids, places, num_fired, share.vectors, share.function,
            share.gates,
        )  # fmt: skip
    else:
        gates = by_neuron(share.gates, share.x.shape[0])
        scale_some_kernel(
            rows.up, rows.up_bias, ids, places, share.fired_masks, num_fired, gates, share.vectors,
            share.function, share.lists,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def add(source, share, scratch, places):
    """Add down rows to the thread's sums, in order."""
    thread, num_tokens = share.thread, share.x.shape[0]
    down, num_fired = share.rows.down, scratch.counts[thread]
    if num_tokens == 1:
        add_one(down, places, num_fired, share.gates, scratch.sums[thread, 0])
    else:
        add_some_kernel(
            down, places, share.fired_masks, num_fired, by_neuron(share.gates, num_tokens),
            scratch.sums[thread, :num_tokens], share.lists,
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
            for i in range(begin, end):
                out[t, i] += factor * biases[block, i]


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
def note_reads(source, reply):
    """Nothing was read."""
