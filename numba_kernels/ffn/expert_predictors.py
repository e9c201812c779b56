"""Predictors within experts, a part of the model (TurboSparse): which neurons count for a token.

Neuron n of a block counts where outer[n] . relu(inner . x) > 0. They are computed before gates, for
chosen blocks alone, and what they leave is a `Selection` of listed neurons, so that all that comes
after is as in other models.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.batch_ffn import (
    TokenLists,
    are_all,
    count_tokens,
    empty_lists,
    gather,
    gathered,
    thread_lists,
)
from hotcold.numba_kernels.decode.block_vectors import (
    block_vectors,
    part_of_row,
    quantize_block,
)
from hotcold.numba_kernels.decode.by_format import matrix_at
from hotcold.numba_kernels.decode.candidates import (
    BLOCK,
    FIRST,
    LAST,
    NUM_SPAN_NUMBERS,
    ROW,
    TOKENS,
    list_spans,
    shift_of,
)
from hotcold.numba_kernels.decode.rows import block_products, split_range
from hotcold.numba_kernels.decode.selection import Selection
from hotcold.numba_kernels.decode.vectors import (
    ActivationSpace,
    activation_space,
    copy_numbers,
    quantize_activations,
)
from hotcold.numba_kernels.ffn_arrays import ExpertPredictors
from hotcold.numba_kernels.loops.mailbox import barrier_wait

_UNIT = 16  # candidates: a cache line of ids
_AT_ONCE = 240  # rows that `TokenLists.products` has place for


class PredictorScratch(NamedTuple):
    """Work space for requests of up to T tokens and N candidates.

    hidden (T * R,) float32: relu(inner . x), R rows a layer at most
    inputs: for `quantize_activations`
    own_ids, ids (N,) int32, own_masks, masks (N,) uint32: what counts, by thread and of all
    counts (threads,) int64; spans (threads, B, 8) int64; lists: gathered activations, products
    """

    hidden: np.ndarray
    inputs: ActivationSpace
    own_ids: np.ndarray
    own_masks: np.ndarray
    ids: np.ndarray
    masks: np.ndarray
    counts: np.ndarray
    spans: np.ndarray
    lists: TokenLists


def new_predictor_scratch(
    predictors: ExpertPredictors, num_threads: int, num_tokens: int, num_neurons: int, width: int
) -> PredictorScratch:
    """Work space for `num_tokens` tokens of `width` numbers, and `num_neurons` a layer."""
    starts = predictors.inner_starts
    num_inner = int((starts[:, -1] - starts[:, 0]).max(initial=0))
    return PredictorScratch(
        hidden=np.zeros(num_tokens * num_inner, np.float32),
        inputs=activation_space(num_threads, num_tokens, max(num_inner, width)),
        own_ids=np.zeros(num_neurons, np.int32),
        own_masks=np.zeros(num_neurons, np.uint32),
        ids=np.zeros(num_neurons, np.int32),
        masks=np.zeros(num_neurons, np.uint32),
        counts=np.zeros(num_threads, np.int64),
        spans=np.zeros((num_threads, starts.shape[1] - 1, NUM_SPAN_NUMBERS), np.int64),
        lists=empty_lists(num_threads, num_tokens, width),
    )


@njit(nogil=True, cache=True)
def _inner_products(thread, num_threads, starts, spans, inner, x, width, num_tokens, hidden, lists):
    """The thread's part of hidden = relu(inner . x), a vector for each token of each block."""
    begin = np.int64(0)
    for span in spans:
        first, last = starts[span[BLOCK]], starts[span[BLOCK] + 1]
        rank, tokens = last - first, span[TOKENS]
        count = count_tokens(tokens, num_tokens)
        out = part_of_row(hidden, begin, count, rank)
        begin += rank * num_tokens
        own, end = split_range(rank, thread, num_threads, _UNIT)
        if own == end:
            continue
        if are_all(tokens, num_tokens):
            block_products(inner, x, out, first + own, first + end, own)
        else:
            gather(x, tokens, width, lists)
            some = gathered(x, width, lists)
            block_products(inner, some, out, first + own, first + end, own)
        for k in range(count):
            for n in range(own, end):
                if out[k, n] <= 0:
                    out[k, n] = 0


@njit(nogil=True, cache=True)
def _count_rows(
    weights, hidden, begin, count, rank, inputs, thread, shift, first, last, ids, tokens,
    num_tokens, products, masks,
):  # fmt: skip
    """masks[i] = bits of the block's tokens for which candidate first + i counts.

    Candidates are rows of the block's matrix: those of ids, less `shift`, or candidate - shift.
    """
    vectors = block_vectors(weights, hidden, begin, count, rank, inputs, thread)
    for start in range(first, last, _AT_ONCE):
        end = min(start + _AT_ONCE, last)
        if ids.shape[0] == 0:
            block_products(weights, vectors, products[:count], start - shift, end - shift, 0)
        else:
            for i in range(start, end):
                row = ids[i] - shift
                block_products(weights, vectors, products[:count], row, row + 1, i - start)
        for i in range(start, end):
            masks[i - first], row = np.uint32(0), 0
            for t in range(num_tokens):
                if tokens >> t & 1:
                    if not products[row, i - start] <= 0:  # a NaN reaches the output
                        masks[i - first] |= np.uint32(1) << np.uint32(t)
                    row += 1


@njit(nogil=True, cache=True)
def _keep_counting(
    thread, num_threads, selection, inner_starts, spans, rows, places, num_tokens, scratch
):  # fmt: skip
    """List the thread's candidates that count for some token; returns how many, from where on."""
    total = spans[spans.shape[0] - 1, LAST] if spans.shape[0] else np.int64(0)
    own, end = split_range(total, thread, num_threads, _UNIT)
    found, begin, ids = np.int64(0), np.int64(0), selection.ids
    products, masks = scratch.lists.products[thread], scratch.own_masks
    for span in spans:
        block, tokens = span[BLOCK], span[TOKENS]
        rank = inner_starts[block + 1] - inner_starts[block]
        count = count_tokens(tokens, num_tokens)
        first, last = max(span[FIRST], own), min(span[LAST], end)
        if first < last:
            kept, place = masks[first:last], places[block]
            shift = span[ROW] if selection.is_listed else span[FIRST]
            if rank == 0:
                kept[:] = np.uint32(tokens & 0xFFFFFFFF)
            else:
                hidden, inputs = scratch.hidden, scratch.inputs
                matrix = matrix_at(rows, place)
                quantize_block(matrix, hidden, begin, count, rank, inputs, thread)
                _count_rows(
                    matrix, hidden, begin, count, rank, inputs, thread, shift, first, last,
                    ids, tokens, num_tokens, products, kept,
                )  # fmt: skip
            for i in range(first, last):
                mask = masks[i]
                if selection.token_masks.shape[0]:
                    mask &= selection.token_masks[i]
                if mask:
                    scratch.own_ids[own + found] = (
                        ids[i] if selection.is_listed else i + shift_of(span)
                    )
                    masks[own + found] = mask
                    found += 1
        begin += rank * num_tokens
    return found, own


@njit(nogil=True, cache=True)
def counting_neurons(
    thread, num_threads, cells, service, layer, selection, starts, x, predictors, scratch
):  # fmt: skip
    """The neurons of `selection` that count, as a `Selection` that lists them.

    All of a service's threads call it, and get the same; `starts` of the shard. Checks nothing.
    Shapes:  x (T, d) float32, T <= 32
    """
    num_tokens, width = x.shape[0], x.shape[1]
    spans = list_spans(selection, starts[layer], num_tokens, scratch.spans[thread])
    inner_starts = predictors.inner_starts[layer]
    lists = thread_lists(scratch.lists, thread, num_tokens)
    vectors = quantize_activations(predictors.inner, x, scratch.inputs, thread)
    _inner_products(
        thread, num_threads, inner_starts, spans, predictors.inner, vectors, width, num_tokens,
        scratch.hidden, lists,
    )  # fmt: skip
    barrier_wait(cells, service, num_threads)
    outer = predictors.outer
    found, own = _keep_counting(
        thread, num_threads, selection, inner_starts, spans, outer.arrays[0], outer.places[layer],
        num_tokens, scratch,
    )  # fmt: skip
    scratch.counts[thread] = found
    barrier_wait(cells, service, num_threads)
    place, total = scratch.counts[:thread].sum(), scratch.counts[:num_threads].sum()
    copy_numbers(scratch.own_ids[own : own + found], scratch.ids[place : place + found])
    copy_numbers(scratch.own_masks[own : own + found], scratch.masks[place : place + found])
    barrier_wait(cells, service, num_threads)
    masks = scratch.masks[: total if num_tokens > 1 else 0]
    return Selection(True, scratch.ids[:total], masks, selection.block_weights)
