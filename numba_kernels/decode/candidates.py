"""A request's candidates: the neurons whose gates are computed, one chosen block after another.

Candidate i is row ids[i] where a `Selection` lists ids. Else candidates are the rows of the chosen
blocks, numbered without gaps. Every division of work is made within blocks, by row, never by the
length of a list: so a token's sums do not depend on its batch-mates.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.rows import split_range

# Numbers of a span, the candidates of a chosen block. TOKENS: bits of those that chose it; ROW,
# END_ROW: its rows in the layer; FIRST, LAST: its candidates; FIRED_END: where a thread's neurons
# that fired in this span and before it end; OFFSET: what is added to a row of the layer for where
# its weights are, which differs for experts in slots.
BLOCK, TOKENS, ROW, END_ROW, FIRST, LAST, FIRED_END, OFFSET = range(8)
NUM_SPAN_NUMBERS = 8
_ALL_TOKENS = 0xFFFFFFFF


@njit(nogil=True, cache=True)
def _first_from(ids, row):
    """Index of the first of ascending `ids` that is at least `row`: a binary search."""
    low, high = 0, ids.shape[0]
    while low < high:
        middle = (low + high) // 2
        if ids[middle] < row:
            low = middle + 1
        else:
            high = middle
    return low


@njit(nogil=True, cache=True, inline="always")
def _tokens_of(block_weights, block, num_tokens):
    """Bits of the tokens that chose the block: all without weights."""
    if block_weights.shape[0] == 0:
        return np.int64(_ALL_TOKENS)
    tokens = np.int64(0)
    for t in range(num_tokens):
        if block_weights[t, block] != 0:
            tokens |= np.int64(1) << t
    return tokens


@njit(nogil=True, cache=True, inline="always")
def list_spans(selection, starts, num_tokens, spans):
    """Write a span for each chosen block, ascending; returns those.

    Shapes:  starts (B + 1,): a layer's of `FfnArrays`; spans (B, 8) int64
    """
    count, candidate, ids = 0, np.int64(0), selection.ids
    for block in range(starts.shape[0] - 1):
        tokens = _tokens_of(selection.block_weights, block, num_tokens)
        row, end_row = starts[block] - starts[0], starts[block + 1] - starts[0]
        if tokens == 0 or row == end_row:
            continue
        first, last = candidate, candidate + end_row - row
        if selection.is_listed:
            first, last = np.int64(_first_from(ids, row)), np.int64(_first_from(ids, end_row))
        span = spans[count]
        span[BLOCK], span[TOKENS], span[ROW], span[END_ROW] = block, tokens, row, end_row
        span[FIRST], span[LAST], span[OFFSET], candidate = first, last, 0, last
        count += 1
    return spans[:count]


@njit(nogil=True, cache=True, inline="always")
def shift_of(span):
    """Row of a candidate less its number, where no ids are listed."""
    return span[ROW] - span[FIRST]


@njit(nogil=True, cache=True)
def own_stripes(stripes, thread, num_threads):
    """First and last of a thread's stripes, of a layer's first rows (B, n + 1), or (0, 0)."""
    if stripes.shape[0] == 0:
        return np.int64(thread), np.int64(thread) + 1
    return split_range(stripes.shape[1] - 1, thread, num_threads, 1)


@njit(nogil=True, cache=True)
def _own_rows(span, stripes, thread, num_threads):
    """First and last row of a thread's part of a span's block, counted from the block's first."""
    if stripes.shape[0] == 0:
        return split_range(span[END_ROW] - span[ROW], thread, num_threads, 4)
    first, last = own_stripes(stripes, thread, num_threads)
    own = stripes[span[BLOCK]]
    return own[first] - own[0], own[last] - own[0]


@njit(nogil=True, cache=True, inline="always")
def own_part(span, selection, stripes, thread, num_threads):
    """First and last of a span's candidates in a thread's part of the block's rows."""
    first, last = _own_rows(span, stripes, thread, num_threads)
    if not selection.is_listed:
        return span[FIRST] + first, span[FIRST] + last
    ids, row = selection.ids, span[ROW]
    return np.int64(_first_from(ids, row + first)), np.int64(_first_from(ids, row + last))


@njit(nogil=True, cache=True, inline="always")
def first_place(spans, selection, stripes, thread, num_threads):
    """How many candidates lower threads have: where a thread's own begin in shared work space."""
    place = np.int64(0)
    for span in spans:
        first, _ = _own_rows(span, stripes, thread, num_threads)
        if selection.is_listed:
            first = np.int64(_first_from(selection.ids, span[ROW] + first)) - span[FIRST]
        place += first
    return place
