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

from hotcold.numba_kernels.checks import float_array, require
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.ir.vector_ir import add_scaled1, axpy4, dot1, dot4
from hotcold.numba_kernels.load.convert import widen_kernel

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
def read_kernel(cache, pages, first, last, out):
    """Heads first..last-1 of a layer's cache (M, G, P, head_dim) as float32, page by page.

    out (G, pages * P, head_dim) float32; checks nothing
    """
    size = cache.shape[2]
    for head in range(first, last):
        for i in range(pages.shape[0]):
            rows = out[head, i * size : (i + 1) * size]
            widen_kernel(cache[pages[i], head], rows, 0, size)


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
def attend_kernel(query, keys, values, group, pages, start, length, scale, softcap, scores, out):
    """out = softmax(scale * keys . query) . values for one head; checks nothing.

    Over the positions start..length-1; where `softcap` is not 0, scores are first brought between
    -softcap and softcap. Position p is in row p % P of page pages[p // P]. Pages of a multiple of
    four positions give the same bits whatever their size and order: additions follow the positions.
    Shapes:  query, out (head_dim,) float32; keys, values (M, G, P, head_dim); scores (>= length,)
             is scratch
    """
    _scores_kernel(query, keys, group, pages, start, length, scale, scores)
    if softcap > 0:
        softcap_kernel(scores[start:length], softcap)
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


def rope(heads: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
    """Heads rotated by one position.

    out[h, i] = a cos - b sin, out[h, half + i] = b cos + a sin; a = heads[h, i], b its half's mate
    i < half; items from 2 * half on stay
    Shapes:  heads, out (H, head_dim), cos_sin (2, half), half <= head_dim / 2   Dtypes: float32
    Errors:  ValueError on any mismatch
    """
    require(heads.ndim == 2, "heads must have 2 dimensions")
    require(heads.shape[1] % 2 == 0, "head_dim must be even")
    out = float_array("heads", heads, heads.shape).copy()
    half = cos_sin.shape[-1] if cos_sin.ndim else 0
    require(2 * half <= heads.shape[1], f"cos_sin is of {half} pairs, more than a head has")
    cos_sin = float_array("cos_sin", cos_sin, (2, half))
    for head in out:
        rope_kernel(head, cos_sin)
    return out


def decode_attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    length: int,
    pages: np.ndarray | None = None,
    *,
    window: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
) -> np.ndarray:
    """Attention of one token over the first `length` cached positions, grouped-query.

    out[h] = softmax(cap(keys[g, s:length] . queries[h] * scale)) . values[g, s:length],
    g = h // (H / G), s = max(0, length - window), or 0 without a window; scale 1 / sqrt(head_dim);
    cap(x) = softcap * tanh(x / softcap), or x without one
    With `pages`, position p is in row p % P of page pages[p // P].
    Shapes:  queries, out (H, head_dim); keys, values (G, P, head_dim), or (M, G, P, head_dim) with
             pages (>= length / P,), P a multiple of 4
    Dtypes:  queries, out float32; keys, values float32 or uint16 (float16 bits); pages int32
    Units:   reads 2 * G * length * head_dim cache items for each group's first head
    Errors:  ValueError on any mismatch
    Source:  Ainslie et al., arXiv 2305.13245; pages: Kwon et al., arXiv 2309.06180
    """
    keys, values = _checked_cache(keys), _checked_cache(values)
    if pages is None:
        require(keys.ndim == 3, "without pages keys must be (G, P, hd)")
        keys, values, pages = keys[None], values[None], np.zeros(1, np.int32)
    else:
        require(keys.ndim == 4, "with pages keys must be (M, G, P, hd)")
        require(keys.shape[2] % 4 == 0, "a page must hold a multiple of 4 positions")
        require(pages.dtype == np.int32 and pages.ndim == 1, "pages must be a list of int32")
        inside = (pages >= 0) & (pages < keys.shape[0])
        require(bool(inside.all()), f"pages must lie in 0..{keys.shape[0] - 1}")
    require(queries.ndim == 2, "queries must be (H, hd)")
    require(keys.shape == values.shape, "keys and values must have one shape")
    require(keys.dtype == values.dtype, "keys and values must have one dtype")
    require(queries.shape[1] == keys.shape[3], "head_dim differs between queries and cache")
    num_groups, most = keys.shape[1], pages.size * keys.shape[2]
    require(
        num_groups > 0 and queries.shape[0] % num_groups == 0,
        "heads must be a multiple of kv heads",
    )
    require(0 < length <= most, f"length must lie in 1..{most}")
    queries = float_array("queries", queries, queries.shape)
    out = np.empty_like(queries)
    scores = np.empty(length, np.float32)
    factor = np.float32(queries.shape[1] ** -0.5 if scale is None else scale)
    start = max(0, length - window) if window else 0
    for h in range(queries.shape[0]):
        g = h // (queries.shape[0] // num_groups)
        attend_kernel(
            queries[h], keys, values, g, pages, start, length, factor, np.float32(softcap), scores,
            out[h],
        )  # fmt: skip
    return out


def _checked_cache(cache: np.ndarray) -> np.ndarray:
    require(cache.dtype in (np.float32, np.uint16), "the cache must be float32 or uint16")
    return np.require(cache, None, ["A", "C"])
