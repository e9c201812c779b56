"""Rotary positions, the KV cache, and attention over it for the tokens of one decoding step.

The cache of a layer is (slots, kv_heads, positions, head_dim); a slot is one sequence. Its pages
are the operating system's, small ones: memory is taken as positions are first written, up to the
context. Items are float32 or float16 (bits in uint16).
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from numba_kernels.checks import float_array, require
from numba_kernels.vector_ir import add_scaled1, add_scaled4, dot1, dot4


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
    """Rotate one head in place by its position's cosines and sines (2, head_dim / 2); no checks."""
    half = head.shape[0] // 2
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
def attend_kernel(query, keys, values, length, scale, scores, out):
    """out = softmax(scale * keys[:length] . query) . values[:length] for one head; no checks.

    query, out (head_dim,) float32; keys, values (P, head_dim); scores (>= length,) is scratch.
    """
    p = 0
    while p + 4 <= length:
        sums = dot4(keys, p, p + 1, p + 2, p + 3, query)
        for k in range(4):
            scores[p + k] = sums[k] * scale
        p += 4
    while p < length:
        scores[p] = dot1(keys, p, query) * scale
        p += 1
    top = scores[0]
    for p in range(1, length):
        top = max(top, scores[p])
    total = np.float32(0)
    for p in range(length):
        scores[p] = math.exp(scores[p] - top)
        total += scores[p]
    share = np.float32(1) / total
    out[:] = 0
    p = 0
    while p + 4 <= length:
        s0, s1, s2, s3 = scores[p], scores[p + 1], scores[p + 2], scores[p + 3]
        add_scaled4(
            out, values, p, p + 1, p + 2, p + 3, s0 * share, s1 * share, s2 * share, s3 * share
        )
        p += 4
    while p < length:
        add_scaled1(out, values, p, scores[p] * share)
        p += 1


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
    Shapes:  heads, out (H, head_dim), cos_sin (2, head_dim / 2)   Dtypes: float32
    Errors:  ValueError on any mismatch
    """
    require(heads.ndim == 2, "heads must have 2 dimensions")
    require(heads.shape[1] % 2 == 0, "head_dim must be even")
    out = float_array("heads", heads, heads.shape).copy()
    cos_sin = float_array("cos_sin", cos_sin, (2, heads.shape[1] // 2))
    for head in out:
        rope_kernel(head, cos_sin)
    return out


def decode_attention(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, length: int
) -> np.ndarray:
    """Attention of one token over the first `length` cached positions, grouped-query.

    out[h] = softmax(keys[g, :length] . queries[h] / sqrt(head_dim)) . values[g, :length],
    g = h // (H / G)
    Shapes:  queries, out (H, head_dim); keys, values (G, P, head_dim)
    Dtypes:  queries, out float32; keys, values float32 or uint16 (float16 bits)
    Units:   reads 2 * G * length * head_dim cache items for each group's first head
    Errors:  ValueError on any mismatch
    Source:  Ainslie et al., arXiv 2305.13245
    """
    require(queries.ndim == 2 and keys.ndim == 3, "queries must be (H, hd), keys (G, P, hd)")
    require(keys.shape == values.shape, "keys and values must have one shape")
    require(keys.dtype == values.dtype, "keys and values must have one dtype")
    require(keys.dtype in (np.float32, np.uint16), "the cache must be float32 or uint16")
    require(queries.shape[1] == keys.shape[2], "head_dim differs between queries and cache")
    require(
        keys.shape[0] > 0 and queries.shape[0] % keys.shape[0] == 0,
        "heads must be a multiple of kv heads",
    )
    require(0 < length <= keys.shape[1], f"length must lie in 1..{keys.shape[1]}")
    queries = float_array("queries", queries, queries.shape)
    keys, values = np.require(keys, None, ["A", "C"]), np.require(values, None, ["A", "C"])
    out = np.empty_like(queries)
    scores = np.empty(length, np.float32)
    scale = np.float32(queries.shape[1] ** -0.5)
    heads_a_group = queries.shape[0] // keys.shape[0]
    for h in range(queries.shape[0]):
        g = h // heads_a_group
        attend_kernel(queries[h], keys[g], values[g], length, scale, scores, out[h])
    return out
