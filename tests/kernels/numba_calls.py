"""Numba's kernels as functions of NumPy arrays, with the names and arguments of `reference`.

Nothing is checked: arrays have the shapes and dtypes that services give kernels.
"""

from __future__ import annotations

import itertools

import numpy as np

from hotcold.numba_kernels.decode.attention import (
    SEGMENT_POSITIONS,
    attend_segment,
    first_seen,
    merge_segments,
    num_segments,
)
from hotcold.numba_kernels.decode.vectors import NO_BIAS
from tests.kernels.layer_numbers import layer_numbers


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
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Without `pages`, keys and values (G, P, hd) are one page."""
    if pages is None:
        short = -keys.shape[1] % 4
        keys, values = (np.pad(each, ((0, 0), (0, short), (0, 0)))[None] for each in (keys, values))
        pages = np.zeros(1, np.int32)
    num_heads, num_groups, dim = len(queries), keys.shape[1], queries.shape[1]
    factor = dim**-0.5 if scale is None else scale
    facts = {"scale": factor, "window": window, "softcap": softcap, "head_dim": dim}
    numbers = layer_numbers(**facts, num_heads=num_heads, num_kv_heads=num_groups)
    heads, positions = num_heads // num_groups, np.array([length - 1], np.int32)
    first = first_seen(window, length - 1) // SEGMENT_POSITIONS
    count = num_segments(window, length - 1)
    qkv, out = queries.reshape(1, -1), np.empty(queries.size, np.float32)
    part_sums = np.empty((count, num_heads * dim), np.float32)
    part_totals = np.empty((count, num_heads, 2), np.float32)
    scores, sums = (np.empty((heads, size), np.float32) for size in (SEGMENT_POSITIONS, dim))
    totals = np.empty((heads, 2), np.float32)
    for part, group in itertools.product(range(count), range(num_groups)):
        attend_segment(
            numbers, keys, values, group, pages, first + part, positions, 0, 1, qkv, scores, sums,
            totals,
        )  # fmt: skip
        own = slice(group * heads, (group + 1) * heads)
        part_sums[part].reshape(num_heads, dim)[own], part_totals[part, own] = sums, totals
    for head in range(num_heads):
        merge_segments(count, part_sums, part_totals, floats(sinks), head, dim, out)
    return out.reshape(queries.shape)


def floats(array: np.ndarray | None) -> np.ndarray:
    """The array, or an empty one for None."""
    return NO_BIAS if array is None else array
