"""Rotary position embedding, the paged KV cache, and attention over it in a decode step.

A layer's cache is (pages, kv_heads, PAGE_POSITIONS, head_dim), float32 or float16 (bits in uint16).
All sequences share a pool of pages; a page table lists each sequence's. Memory is committed as
positions are first written.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.ir.vector_ir import add_scaled1, axpy4, dot1, dot4

# Positions of a page: a multiple of four, since four are computed at once, and few enough that a
# short sequence wastes little of its last page.
PAGE_POSITIONS = 64


@intrinsic
def narrow(typingctx, array, value):
    """`value` (float32) in the format of `array`: itself, or rounded to float16 bits."""
    if array.dtype == types.float32:
        result = types.float32
    elif array.dtype == types.uint16:
        result = types.uint16
    else:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if result == types.float32:
            return args[1]
        half = builder.fptrunc(args[1], ir.HalfType())
        return builder.bitcast(half, ir.IntType(16))

    return result(array, types.float32), codegen


@njit(nogil=True, cache=True)
def rope_kernel(head, cos_sin):
    """Rotate one head in place by its position's cosines and sines (2, half); no checks.

    Items i < half and half + i are rotated as pairs; items from 2 * half on stay.
    """
    half = cos_sin.shape[1]
    for i in range(half):
        a, b = head[i], head[half + i]
        head[i] = a * cos_sin[0, i] - b * cos_sin[1, i]
        head[half + i] = b * cos_sin[0, i] + a * cos_sin[1, i]


@njit(nogil=True, cache=True)
def store_kernel(cache, position, values):
    """cache[position] = values, in the cache's format; cache (P, head_dim); checks nothing."""
    for i in range(values.shape[0]):
        cache[position, i] = narrow(cache, values[i])


@njit(nogil=True, cache=True)
def _scores_kernel(query, keys, group, pages, start, length, scale, scores):
    """scores[p] = scale * key of position p . query, start <= p < length; four at once."""
    size = keys.shape[2]
    for begin in range(start - start % size, length, size):
        page, part = keys[pages[begin // size], group], scores[begin : begin + size]
        last, p = min(length - begin, size), max(start - begin, 0)
        while p + 4 <= last:
            sums = dot4(page, p, p + 1, p + 2, p + 3, query)
            for k in range(4):
                part[p + k] = sums[k] * scale
            p += 4
        while p < last:
            part[p] = dot1(page, p, query) * scale
            p += 1


@njit(nogil=True, cache=True)
def _weighted_sum_kernel(values, group, pages, start, length, scores, share, out):
    """out = sum over start <= p < length of scores[p] * share * value of position p."""
    size = values.shape[2]
    out[:] = 0
    for begin in range(start - start % size, length, size):
        page, part = values[pages[begin // size], group], scores[begin : begin + size]
        last, p = min(length - begin, size), max(start - begin, 0)
        while p + 4 <= last:
            s0, s1, s2, s3 = part[p], part[p + 1], part[p + 2], part[p + 3]
            axpy4(out, page, p, p + 1, p + 2, p + 3, s0 * share, s1 * share, s2 * share, s3 * share)
            p += 4
        while p < last:
            add_scaled1(out, page, p, part[p] * share)
            p += 1


@njit(nogil=True, cache=True)
def softcap_kernel(values, cap):
    """values = cap * tanh(values / cap), in place; checks nothing."""
    for i in range(values.shape[0]):
        values[i] = cap * np.float32(math.tanh(values[i] / cap))


@njit(nogil=True, cache=True)
def attend_kernel(numbers, query, keys, values, group, pages, length, scores, out):
    """out = softmax(scale * keys . query) . values for one head; checks nothing.

    `numbers` of the layer (LAYER_NUMBERS) has scale, window and softcap. Over the positions before
    `length`, with a window the last of them; where softcap is not 0, scores are first brought
    between -softcap and softcap. Position p is in row p % P of page pages[p // P]. Pages of a
    multiple of four positions give the same bits whatever their size and order: additions follow
    the positions.
    Shapes:  query, out (head_dim,) float32; keys, values (M, G, P, head_dim); scores (>= length,)
             is scratch
    Source:  Ainslie et al., arXiv 2305.13245; pages: Kwon et al., arXiv 2309.06180
    """
    start = max(0, length - numbers.window) if numbers.window else 0
    _scores_kernel(query, keys, group, pages, start, length, numbers.scale, scores)
    if numbers.softcap > 0:
        softcap_kernel(scores[start:length], numbers.softcap)
    top = scores[start]
    for p in range(start + 1, length):
        top = max(top, scores[p])
    total = np.float32(0)
    for p in range(start, length):
        scores[p] = math.exp(scores[p] - top)
        total += scores[p]
    _weighted_sum_kernel(values, group, pages, start, length, scores, np.float32(1) / total, out)


def rope_table(inverse_frequencies: np.ndarray, num_positions: int) -> np.ndarray:
    """Cosines and sines of every position's angles.

    table[p, 0, i] = cos(p * f[i]); table[p, 1, i] = sin(p * f[i])
    Shapes:  inverse_frequencies f (head_dim / 2,), table (P, 2, head_dim / 2)   Dtypes: float32
    Source:  Su et al., arXiv 2104.09864; float32 products, as transformers computes them
    """
    positions = np.arange(num_positions, dtype=np.float32)
    angles = positions[:, None] * inverse_frequencies[None, :].astype(np.float32)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
