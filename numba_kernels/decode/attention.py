"""Rotary position embedding, the paged KV cache, and attention over it in a decode step.

A layer's cache is (pages, kv_heads, PAGE_POSITIONS, row). A row is head_dim numbers, float32 or
float16 (bits in uint16), or in int8 with a float32 scale for each 32 behind them. All sequences
share a pool of pages; a page table lists each sequence's. Memory is committed as positions are
first written.
"""

import math

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.ir.attention_ir import (
    POSITIONS_AT_ONCE,
    QUERIES_AT_ONCE,
    add_page_values,
    exponentials,
    score_page,
    store_row,
    widen_cached,
)

# Positions of a page: a multiple of four, since four are computed at once, and few enough that a
# short sequence wastes little of its last page.
PAGE_POSITIONS = 64
# Positions that one thread takes at a time, counted from the sequence's first: a multiple of a
# vector's lanes, and few enough that threads finish together.
SEGMENT_POSITIONS = 256


@njit(nogil=True, cache=True)
def rope_kernel(head, cos_sin, half):
    """Rotate one head in place by its position's cosines, then sines, of up to W pairs; no checks.

    cos_sin (2 W + 1,); items i < min(half, W) and half + i are rotated as pairs, the others stay.
    """
    width = cos_sin.shape[0] // 2
    for i in range(min(half, width)):
        a, b, cosine, sine = head[i], head[half + i], cos_sin[i], cos_sin[width + i]
        head[i] = a * cosine - b * sine
        head[half + i] = b * cosine + a * sine


@njit(nogil=True, cache=True)
def store_kernel(cache, page, group, row, vectors, token, column, head_dim):
    """Write `head_dim` items of vectors[token] from `column` on to a row of a layer's cache.

    cache (M, G, P, row) in its own format; checks nothing
    """
    store_row(cache, page, group, row, vectors, token, column, head_dim)


@njit(nogil=True, cache=True)
def read_page(cache, page, head, first, last, head_dim, out):
    """out[p] = row p of a head's page, as float32, for first <= p < last; checks nothing.

    cache (M, G, P, row) of a layer; out (>= last, >= head_dim) float32
    """
    for row in range(first, last):
        widen_cached(cache, page, head, row, head_dim, out, row)


@njit(nogil=True, cache=True, inline="always")
def first_seen(window, position):
    """The first position that a token at `position` sees."""
    return max(0, position + 1 - window) if window else 0


@njit(nogil=True, cache=True)
def num_segments(window, position):
    """Segments that hold the positions which a token at `position` sees."""
    return position // SEGMENT_POSITIONS - first_seen(window, position) // SEGMENT_POSITIONS + 1


@njit(nogil=True, cache=True)
def _exponentials(numbers, begin, positions, first_token, num_tokens, scores, sums, totals):
    """Scores to exponentials; their totals; sums 0: rows of tokens that see the segment."""
    heads = numbers.num_heads // numbers.num_kv_heads
    for row in range(num_tokens * heads):
        position = positions[first_token + row // heads]
        first = max(begin, first_seen(numbers.window, position)) - begin
        last = min(begin + SEGMENT_POSITIONS, position + 1) - begin
        if first < last:
            totals[row, 0], totals[row, 1] = exponentials(scores, row, first, last, numbers.softcap)
            for i in range(numbers.head_dim):
                sums[row, i] = 0


@njit(nogil=True, cache=True)
def attend_segment(
    numbers, keys, values, group, pages, segment, positions, first_token, num_tokens, qkv, scores,
    sums, totals,
):  # fmt: skip
    """A KV head's part of attention: tokens of one sequence, positions of one segment.

    For each token t of `num_tokens` from `first_token` on and each query head h of the group, over
    the positions p of the segment that t sees, row r = t * heads + h has
        e[p] = exp(score[p] - totals[r, 0]),  totals[r, 0] the largest score, totals[r, 1] = sum e
        sums[r] = sum of e[p] * value[p]
    A row of a token that sees none of them stays as it is. `numbers` of the layer (LAYER_NUMBERS)
    has scale, window and softcap; where softcap is not 0, scores are first brought between -softcap
    and softcap. Position p is in row p % P of page pages[p // P]. Pages of a multiple of four
    positions give the same bits whatever their size and order, and a row's do not depend on the
    others: each sum follows the positions. Keys and values are read once from memory for all rows.
    Shapes:  qkv (T, (H + 2 G) * head_dim); keys, values (M, G, P, row); scores (rows,
             SEGMENT_POSITIONS) is scratch; sums (rows, head_dim), totals (rows, 2) float32
    Source:  Ainslie et al., arXiv 2305.13245; pages: Kwon et al., arXiv 2309.06180; segments:
             Dao et al., flash-decoding, 2023
    """
    dim, heads, size = numbers.head_dim, numbers.num_heads // numbers.num_kv_heads, keys.shape[2]
    first_column, begin = group * heads * dim, segment * SEGMENT_POSITIONS
    low, high = begin + SEGMENT_POSITIONS, begin  # of all tokens
    for t in range(first_token, first_token + num_tokens):
        low = min(low, max(begin, first_seen(numbers.window, positions[t])))
        high = max(high, min(begin + SEGMENT_POSITIONS, positions[t] + 1))
    for is_values in range(2):
        at = low
        while at < high:
            start = at // size * size
            page, end = pages[at // size], min(start + size, high)
            ahead, next_page, has_next = keys, page, end < high or not is_values
            if end < high:
                ahead, next_page = values if is_values else keys, pages[end // size]
            elif not is_values:
                ahead, next_page = values, pages[low // size]
            for t in range(num_tokens):
                position = positions[first_token + t]
                first = max(at, first_seen(numbers.window, position)) - start
                last = min(end, position + 1) - start
                for head in range(0, heads if first < last else 0, QUERIES_AT_ONCE):
                    count, row = min(heads - head, QUERIES_AT_ONCE), t * heads + head
                    is_wanted = has_next and row == 0
                    if is_values:
                        place = start + first - begin
                        add_page_values(
                            values, page, group, first, last, scores, row, place, dim, sums, row,
                            ahead, next_page, is_wanted, count,
                        )  # fmt: skip
                    else:
                        whole = first - first % POSITIONS_AT_ONCE
                        place, column = start + whole - begin, first_column + head * dim
                        score_page(
                            keys, page, group, whole, last, qkv, first_token + t, column, dim,
                            numbers.scale, scores, row, place, ahead, next_page, is_wanted, count,
                        )  # fmt: skip
            at = end
        if not is_values:
            _exponentials(numbers, begin, positions, first_token, num_tokens, scores, sums, totals)


@njit(nogil=True, cache=True, inline="always")
def sink_share(sinks, head, top):
    """What a head's sink adds to the sum of exp(score - top): 0 where there are none.

    A sink is a learned logit that joins a head's softmax and has no value; sinks (H,) or (0,).
    Source:  OpenAI, gpt-oss model card, 2025; Xiao et al., arXiv 2309.17453
    """
    if sinks.shape[0] == 0:
        return np.float32(0)
    return np.float32(math.exp(np.float64(sinks[head]) - top))


@njit(nogil=True, cache=True)
def merge_segments(count, sums, totals, sinks, head, dim, out):
    """out = the attention of one head, of `count` segments' parts in the order of positions.

    Each is brought from its own largest score to the largest of all; sinks as in `sink_share`.
    Shapes:  sums (segments, H * dim), totals (segments, H, 2), out (H * dim,) float32
    """
    first, top = head * dim, totals[0, head, 0]
    for segment in range(1, count):
        top = max(top, totals[segment, head, 0])
    total = np.float32(0)
    for i in range(first, first + dim):
        out[i] = 0
    for segment in range(count):
        share = np.float32(math.exp(totals[segment, head, 0] - top))
        total += share * totals[segment, head, 1]
        for i in range(first, first + dim):
            out[i] += share * sums[segment, i]
    inverse = np.float32(1) / (total + sink_share(sinks, head, top))
    for i in range(first, first + dim):
        out[i] *= inverse


def rope_table(inverse_frequencies: np.ndarray, num_positions: int) -> np.ndarray:
    """Cosines and sines of every position's angles.

    table[p, 0, i] = cos(p * f[i]); table[p, 1, i] = sin(p * f[i])
    Shapes:  inverse_frequencies f (head_dim / 2,), table (P, 2, head_dim / 2)   Dtypes: float32
    Source:  Su et al., arXiv 2104.09864; float32 products, as transformers computes them
    """
    positions = np.arange(num_positions, dtype=np.float32)
    angles = positions[:, None] * inverse_frequencies[None, :].astype(np.float32)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
