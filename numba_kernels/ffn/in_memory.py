"""Neurons in memory, each with its own rows: their arrays, and their steps of `layer_ffn`.

A neuron that does not fire costs its gate row. A gate's dot product does not depend on the thread
that computes it, so gates are shared by work stealing, and with them up rows where all neurons are
kept. Sums depend on their order: each thread sums the neurons of its own stripes, and adds these up
as `numba_kernels.decode.stripes` says.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import types

from hotcold.numba_kernels.compiler import by_types, inlined_by_types, njit
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
from hotcold.numba_kernels.decode.by_format import with_matrix
from hotcold.numba_kernels.decode.candidates import (
    BLOCK,
    FIRED_END,
    NUM_SPAN_NUMBERS,
    OFFSET,
    ROW,
    TOKENS,
    own_part,
    own_stripes,
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
from hotcold.numba_kernels.decode.stripes import ALL_STRIPES, list_by_stripe, meet
from hotcold.numba_kernels.decode.vectors import (
    ActivationSpace,
    activation_space,
    aligned_zeros,
    in_order_of,
)
from hotcold.numba_kernels.ffn_arrays import FfnArrays
from hotcold.numba_kernels.formats import CHUNK, whole_chunks
from hotcold.numba_kernels.loops.work_stealing import (
    block_rows,
    block_span,
    least_rows,
    new_block_counters,
    next_block,
    num_blocks,
)

# kinds of work that threads share in a request; down rows only where they are transposed
GATES, UPS, DOWN = range(3)
_NUM_KINDS = 3


class FfnScratch(NamedTuple):
    """Work space for requests of up to T tokens and N candidates.

    sums (threads * S, T, d in whole chunks): up to S sums of each thread's stripes, which begin at
    stripes first_stripes (threads, S) int64, of thread t the first num_sums[t]; transposed sums
    (1, T, N): numbers that down rows are multiplied with
    values, ups (T * N,) float32: of candidates in order, gates and up . x
    fired_ids (N,) int32, fired_masks (N,) uint32, gates (T * N,) float32: neurons that fired, those
    of thread t from firsts[t] on; firsts, counts, up_counts (threads,) int64: counts of neurons
    that fired, and of up rows read; order (N,) int32: of a thread's neurons that fired, by stripe;
    stripes end at stripe_ends (threads, stripes) int64; added (threads, 2, threads * S) int64: work
    space
    spans (threads, B, 8) int64: of `decode.candidates`
    lists: each token's neurons; inputs: for `quantize_activations`; counters (kinds, threads * 16)
    int32 of blocks taken
    rows (threads, S, T, 240) float32: of transposed ones, sums of stripes of some rows
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
    first_stripes: np.ndarray
    num_sums: np.ndarray
    order: np.ndarray
    stripe_ends: np.ndarray
    added: np.ndarray
    spans: np.ndarray
    lists: TokenLists
    inputs: ActivationSpace
    counters: np.ndarray
    rows: np.ndarray


def scratch_of(
    sums: np.ndarray, num_threads: int, num_candidates: int, num_blocks: int, width: int,
    input_width: int, num_stripes: int = 1,
) -> FfnScratch:  # fmt: skip
    """Work space whose `sums` (…, T, …) are given; vectors of up to `input_width` are quantized."""
    num_tokens, num_sums = sums.shape[1], max(1, len(sums) // num_threads)
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
        first_stripes=np.zeros((num_threads, num_sums), np.int64),
        num_sums=np.zeros(num_threads, np.int64),
        order=np.zeros(num_candidates, np.int32),
        stripe_ends=np.zeros((num_threads, num_stripes), np.int64),
        added=np.zeros((num_threads, 2, num_threads * num_sums), np.int64),
        spans=np.zeros((num_threads, num_blocks, NUM_SPAN_NUMBERS), np.int64),
        lists=empty_lists(num_threads, num_tokens, width),
        inputs=activation_space(num_threads, num_tokens, input_width),
        counters=new_block_counters(_NUM_KINDS, num_threads),
        rows=np.zeros((0, 0, 0, 0), np.float32),
    )


def new_scratch(
    num_threads: int, num_tokens: int, num_candidates: int, width: int, num_blocks: int = 1,
    num_stripes: int = 1,
) -> FfnScratch:  # fmt: skip
    """Work space for requests of up to `num_tokens` tokens and `num_candidates` neurons.

    num_stripes: of the service. What is not used of the sums takes no memory.
    """
    num_sums = 2 * num_stripes.bit_length()
    sums = aligned_zeros((num_threads * num_sums, num_tokens, whole_chunks(width)))
    return scratch_of(sums, num_threads, num_candidates, num_blocks, width, width, num_stripes)


class Share(NamedTuple):
    """A thread's share of a request of T tokens.

    cells of `SharedBuffers`; x (T, d) float32, `vectors` the same as gate rows take them
    spans: the candidates, of `decode.candidates`
    rows: `FfnArrays` of this layer alone; of offloaded neurons with matrices by slot
    fired_ids, fired_masks, flat_gates: the thread's part of `FfnScratch`; gates (N, T) the same
    places: of up and down rows, once `find_fired` has found them; lists: work space
    stripes (B, n + 1): the layer's, or (0, 0)
    out (T, d), more (M, at least T, d) float32: the layer's output
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
    stripes: np.ndarray
    out: np.ndarray
    more: np.ndarray


@njit(nogil=True, cache=True)
def part_of(array, first, last):
    """array[first:last], or the empty array."""
    return array[first:last] if array.shape[0] else array


@inlined_by_types
def has_rows(weights):  # type: ignore[no-untyped-def]
    """Whether a layer has such rows: `BlockRows` of no blocks, or a matrix; for compiled code."""
    if isinstance(weights, types.Array):
        return lambda weights: weights.shape[0] > 0
    return lambda weights: weights.places.shape[1] > 0


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
        arrays.stripes,
        arrays.first_stripe,
        arrays.stripes_at_once,
    )


@njit(nogil=True, cache=True)
def stripes_of(arrays, layer):
    """First rows of a layer's stripes (B, n + 1), or (0, 0)."""
    return arrays.stripes[min(layer, arrays.stripes.shape[0] - 1)]


@njit(nogil=True, cache=True, inline="always")
def layer_rows(source, layer):
    """`FfnArrays` of one layer."""
    first, last = layer_span(source, layer)
    up, down = part_of(source.up, first, last), source.down[first:last]
    return with_matrices(source, layer, source.gate[first:last], up, down)


@njit(nogil=True, cache=True)
def _take_of_span(
    weights, offset, counters, part, taken, passed, first, last, span, num_tokens, width, masks,
    bias, places, x, function, activates, values, lists,
):  # fmt: skip
    """The part of `take_products` in one matrix: row r of the layer is its row r + offset.

    first, last: of the span's candidates in this part. Returns the block that is taken next, and
    how many blocks the part has up to this span's end; `passed`: up to its begin.
    """
    products, activates_one = by_neuron(values, num_tokens), False
    size, vectors = block_size(weights, num_tokens), in_order_of(weights, x)
    least = size
    if num_tokens == 1:
        size, least, activates_one = block_rows(weights), least_rows(weights), activates
    shift, tokens = shift_of(span), np.uint32(span[TOKENS])
    is_gathered, end_block = are_all(tokens, num_tokens), passed
    end_block += num_blocks(last - first, size, least)
    while taken < end_block:
        begin, end = block_span(last - first, size, least, taken - passed)
        begin, end = first + begin, first + end
        if activates_one:
            gate_values_kernel(
                weights, bias, places, shift, offset, vectors, function, begin, end, last,
                values[begin:end],
            )  # fmt: skip
        else:
            row = first_of_rows(places, masks, shift, begin, end)
            if row >= 0 and not is_gathered:
                gather(vectors, tokens, width, lists)
                is_gathered = True
            products_kernel(
                weights, places, offset, masks, tokens, row, vectors, width, begin, end,
                products[begin:end], lists,
            )  # fmt: skip
        taken = next_block(counters, part)
    return taken, end_block


@by_types
def in_span(weights, layer, span, offset, kernel, *others):  # type: ignore[no-untyped-def]
    """kernel(matrix, offset, *others): what is number r in the layer is row r + offset.

    weights: `BlockRows`, or a matrix with that offset; for compiled code
    """

    def in_block(weights, layer, span, offset, kernel, *others):  # type: ignore[no-untyped-def]
        place = weights.places[layer, span[BLOCK]]
        return with_matrix(weights.arrays, place, kernel, -span[ROW], *others)

    def in_all(weights, layer, span, offset, kernel, *others):  # type: ignore[no-untyped-def]
        return kernel(weights, offset, *others)

    return in_all if isinstance(weights, types.Array) else in_block


@njit(nogil=True, cache=True)
def take_products(
    counters, thread, num_threads, num_tokens, width, selection, layer, spans, stripes, weights,
    bias, places, x, function, activates, values, lists,
):  # fmt: skip
    """`share_products` without a `Share`: to pass one takes longer than a short row."""
    for turn in range(num_threads):
        part = (thread + turn) % num_threads
        # Of this part's blocks, span after span.
        taken, passed = next_block(counters, part), np.int64(0)
        for span in spans:
            first, last = own_part(span, selection, stripes, part, num_threads)
            taken, passed = in_span(
                weights, layer, span, span[OFFSET], _take_of_span, counters, part, taken, passed,
                first, last, span, num_tokens, width, selection.token_masks, bias, places, x,
                function, activates, values, lists,
            )  # fmt: skip


@njit(nogil=True, cache=True, inline="always")
def share_products(counters, share, spans, weights, bias, places, activates, values):
    """values of the spans' candidates in the blocks that this thread takes, by work stealing.

    weights . x, (N, T); one token's fn(weights . x + bias) with `activates`. Candidate i's row is
    places[i], or row i of the chosen blocks where `places` is empty.
    """
    take_products(
        counters, share.thread, share.num_threads, share.x.shape[0], share.x.shape[1],
        share.selection, share.layer, spans, share.stripes, weights, bias, places, share.vectors,
        share.function, activates, values, share.lists,
    )  # fmt: skip


@njit(nogil=True, cache=True, inline="always")
def gates_and_ups(counters, share, spans, has_ups, scratch):
    """Gates of the spans' candidates, and up products with `has_ups`; counters of both kinds."""
    rows, ids = share.rows, share.selection.ids
    share_products(
        counters[GATES], share, spans, rows.gate, rows.gate_bias, ids, True, scratch.values
    )
    if has_ups:
        share_products(counters[UPS], share, spans, rows.up, rows.up_bias, ids, False, scratch.ups)


# The steps of `numba_kernels.ffn.layer_ffn`, in order.


@njit(nogil=True, cache=True, inline="always")
def begin(source, share, scratch):
    """Nothing has to be read."""
    return True


@njit(nogil=True, cache=True, inline="always")
def clear(source, share, scratch):
    """Sums become zero stripe by stripe."""


@njit(nogil=True, cache=True, inline="always")
def compute_gates(source, share, scratch):
    """Gates of all candidates, and up products too where all of them are kept."""
    has_ups = share.thresholds.gate < 0 and not share.selection.is_listed
    has_ups = has_ups and has_rows(share.rows.up)
    gates_and_ups(scratch.counters, share, share.spans, has_ups, scratch)
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


@njit(nogil=True, cache=True)
def _scale_in_span(
    up, offset, begin, end, bias, ids, places, masks, gates, flat_gates, x, width, function, lists
):  # fmt: skip
    """`scale` of those that fired from number `begin` to `end` - 1."""
    vectors = in_order_of(up, x)
    if gates.shape[1] == 1:
        scale_by_up(up, bias, ids, places, offset, begin, end, vectors, function, flat_gates)
    else:
        scale_some_kernel(
            up, bias, ids, places, offset, masks, begin, end, gates, vectors, width, function, lists
        )


@njit(nogil=True, cache=True, inline="always")
def scale(source, share, scratch):
    """Multiply the gates of what fired by up . x + bias."""
    rows, begin = share.rows, np.int64(0)
    if has_rows(rows.up):
        for span in share.spans:
            in_span(
                rows.up, share.layer, span, np.int64(0), _scale_in_span, begin, span[FIRED_END],
                rows.up_bias, share.fired_ids, share.places, share.fired_masks, share.gates,
                share.flat_gates, share.vectors, share.x.shape[1], share.function, share.lists,
            )  # fmt: skip
            begin = span[FIRED_END]


@njit(nogil=True, cache=True)
def _add_into(sums, target, source, num_tokens, begin, end):
    """sums[target] += sums[source], of the first `num_tokens`, in columns begin..end-1."""
    for t in range(num_tokens):
        own, other = sums[target, t, begin:end], sums[source, t, begin:end]
        for i in range(own.shape[0]):
            own[i] += other[i]


@njit(nogil=True, cache=True)
def merge_stripes(sums, first_stripes, count, first, end, num_tokens, width):
    """Add up what meets of sums of stripes first..end-1; returns how many are left of `count`."""
    while count > 1 and meet(first_stripes[count - 2], first_stripes[count - 1], first, end):
        count -= 1
        _add_into(sums, count - 1, count, num_tokens, 0, width)
    return count


@njit(nogil=True, cache=True)
def _add_stripes(
    down, places, masks, gates, flat_gates, order, ends, first_stripe, sums, first_stripes, lists,
):  # fmt: skip
    """Add down rows stripe by stripe, and what meets of the sums; returns how many are left over.

    sums (S, T, d), first_stripes (S,): a thread's; first_stripe: the number of its first one
    """
    num_tokens, count, first = gates.shape[1], 0, np.int64(0)
    end_stripe, width = first_stripe + ends.shape[0], sums.shape[2]
    for i in range(ends.shape[0] + 1):
        stripe = first_stripe + i
        count = merge_stripes(sums, first_stripes, count, first_stripe, stripe, num_tokens, width)
        if stripe == end_stripe:
            break
        own = sums[count, :num_tokens]
        own[:] = 0
        if num_tokens == 1:
            add_one(down, places, order, first, ends[i], flat_gates, own[0])
        else:
            add_some_kernel(down, places, masks, order[first : ends[i]], gates, own, lists)
        first_stripes[count] = stripe
        first = ends[i]
        count += 1
    return count


@njit(nogil=True, cache=True, inline="always")
def add(source, share, scratch):
    """Add down rows to the sums of the thread's stripes, and what meets of these."""
    thread, num_fired = share.thread, scratch.counts[share.thread]
    begin, end = own_stripes(share.stripes, thread, share.num_threads)
    ends = scratch.stripe_ends[thread, : end - begin]
    order = scratch.order[scratch.firsts[thread] :][:num_fired]
    list_by_stripe(
        share.stripes, begin, end, share.spans, share.fired_ids[:num_fired], order, ends
    )  # fmt: skip
    height = scratch.first_stripes.shape[1]
    scratch.num_sums[thread] = _add_stripes(
        share.rows.down, share.places, share.fired_masks, share.gates, share.flat_gates, order,
        ends, share.rows.first_stripe + begin, scratch.sums[thread * height : (thread + 1) *
        height], scratch.first_stripes[thread], share.lists,
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


@njit(nogil=True, cache=True)
def _add_sums(sums, first_stripes, num_sums, first, end, num_tokens, begin, last, added):
    """Add what meets of all threads' sums, in columns begin..last-1; returns how many are left.

    Those are sums[added[0, i]], and begin at stripes added[1, i]. first..end-1: the service's
    stripes
    """
    count, height = 0, first_stripes.shape[1]
    for thread in range(num_sums.shape[0] + 1):
        is_end = thread == num_sums.shape[0]
        for i in range(1 if is_end else num_sums[thread]):
            stripe = end if is_end else first_stripes[thread, i]
            while count > 1 and meet(added[1, count - 2], added[1, count - 1], first, stripe):
                count -= 1
                _add_into(sums, added[0, count - 1], added[0, count], num_tokens, begin, last)
            if not is_end:
                added[0, count], added[1, count] = thread * height + i, stripe
                count += 1
    return count


@njit(nogil=True, cache=True, inline="always")
def add_up(source, share, scratch):
    """The sums that are left over, and the biases, in this thread's range of columns.

    Biases are added to the sum of all stripes, or where a service has some only, stand behind
    those.
    """
    out, more, sums, rows, stripes = share.out, share.more, scratch.sums, share.rows, share.stripes
    begin, end = split_range(out.shape[1], share.thread, share.num_threads, CHUNK)
    added, biases = scratch.added[share.thread], rows.down_bias[share.layer]
    end_stripe = rows.first_stripe + stripes.shape[1] - 1 if stripes.shape[0] else ALL_STRIPES
    count = _add_sums(
        sums, scratch.first_stripes, scratch.num_sums, rows.first_stripe, end_stripe, out.shape[0],
        begin, begin + (end - begin + CHUNK - 1) // CHUNK * CHUNK, added,
    )  # fmt: skip
    out[:, begin:end] = 0
    of_biases = out
    if more.shape[0] and biases.shape[1]:
        of_biases = more[max(count - 1, 0), : out.shape[0]]
    set_bias(share.selection.block_weights, biases, of_biases, begin, end)
    for i in range(count):
        for t in range(out.shape[0]):
            target = more[i - 1, t] if i else out[t]
            if i:
                target[begin:end] = 0
            add_in_order(rows.down, sums[added[0, i], t], target, begin, end)


@njit(nogil=True, cache=True, inline="always")
def note_reads(source, reply):
    """Nothing was read."""
