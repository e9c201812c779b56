"""Texts for attention of prompts, and chunks of them through the kernel on a paged cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.numba_kernels.ir.attention_ir import CACHE_BLOCK
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL
from hotcold.numba_kernels.prefill.attention import (
    prompt_attention_kernel,
    prompt_space_items,
)
from tests.kernels.arrays import random_floats
from tests.kernels.layer_numbers import layer_numbers
from tests.kernels.reference import narrowed, widened

DTYPES = {"f32": np.float32, "f16": np.uint16, "q8": np.int8}
NAN: dict[Any, Any] = {
    np.float32: np.nan,
    np.uint16: 0x7E00,
    np.int8: -1,
}  # four bytes -1 are a scale of NaN


class Text(NamedTuple):
    """Queries (P, H, hd) of all positions; keys and values (G, P, row) as in the cache."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray

    @property
    def length(self) -> int:
        """Its positions."""
        return len(self.queries)


def a_text(dtype: type, length: int, heads: tuple[int, int], head_dim: int) -> Text:
    num_heads, num_kv_heads = heads
    queries = random_floats(1, length, num_heads, head_dim)
    keys, values = (random_floats(seed, num_kv_heads, length, head_dim) for seed in (2, 3))
    return Text(queries, cached(keys, dtype), cached(values, dtype))


def cached(numbers: np.ndarray, dtype: type) -> np.ndarray:
    """Rows of a cache that hold float32 numbers (..., hd)."""
    if dtype is not np.int8:
        return narrowed(numbers, dtype)
    starts = range(0, numbers.shape[-1], CACHE_BLOCK)
    blocks = [numbers[..., start : start + CACHE_BLOCK] for start in starts]
    scales = [np.abs(block).max(axis=-1, keepdims=True) / np.float32(127) for block in blocks]
    codes = [np.rint(block / scale) for block, scale in zip(blocks, scales, strict=True)]
    parts = [code.astype(np.int8) for code in codes] + [scale.view(np.int8) for scale in scales]
    return np.concatenate(parts, axis=-1)


def numbers_in(rows: np.ndarray) -> np.ndarray:
    """The float32 numbers that rows of a cache hold."""
    if rows.dtype != np.int8:
        return widened(rows).astype(np.float32)
    num_scales = -(-rows.shape[-1] // (CACHE_BLOCK + 4))
    codes, scales = np.split(rows, [rows.shape[-1] - 4 * num_scales], axis=-1)
    each = np.repeat(np.ascontiguousarray(scales).view(np.float32), CACHE_BLOCK, axis=-1)
    return codes * each[..., : codes.shape[-1]]


def paged(cache: np.ndarray, pages: np.ndarray, seen_from: int) -> np.ndarray:
    """(pages, G, PAGE_POSITIONS, row) with NaN wherever no position from `seen_from` on is."""
    num_heads, length, row = cache.shape
    nan = NAN[cache.dtype.type]
    whole = np.full((num_heads, len(pages) * PAGE_POSITIONS, row), nan, cache.dtype)
    whole[:, seen_from:length] = cache[:, seen_from:]
    pool = np.full((len(pages) + 3, num_heads, PAGE_POSITIONS, row), nan, cache.dtype)
    parts = whole.reshape(num_heads, len(pages), PAGE_POSITIONS, row)
    pool[pages] = parts.transpose(1, 0, 2, 3)
    return pool


def attend(
    text: Text,
    first: int = 0,
    last: int | None = None,
    *,
    num_threads: int = 1,
    window: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Outputs (last - first, H, hd) of positions first..last-1 as one chunk.

    The cache holds what they see, in pages of any order, and NaN in all other places.
    """
    last = text.length if last is None else last
    queries = text.queries[first:last]
    num_heads, head_dim = queries.shape[1:]
    num_pages = -(-last // PAGE_POSITIONS)
    pages = np.random.default_rng(last).permutation(num_pages + 3)[:num_pages].astype(np.int32)
    seen_from = max(0, first + 1 - window) if window else 0
    keys, values = (paged(cache[:, :last], pages, seen_from) for cache in (text.keys, text.values))
    numbers = layer_numbers(
        num_heads=num_heads,
        num_kv_heads=len(text.keys),
        head_dim=head_dim,
        window=window,
        softcap=softcap,
        scale=head_dim**-0.5 if scale is None else scale,
    )
    qkv = np.full((len(queries), (num_heads + 2) * head_dim), np.nan, np.float32)
    qkv[:, : num_heads * head_dim] = queries.reshape(len(queries), -1)
    out = np.full((len(queries), num_heads * head_dim), np.nan, np.float32)
    counters = np.zeros(INTS_A_CELL, np.int32)
    own_sinks = np.empty(0, np.float32) if sinks is None else sinks

    def run(thread: int) -> None:
        space = aligned_empty((prompt_space_items(head_dim),), np.float32)
        space[:] = np.nan
        prompt_attention_kernel(
            numbers, own_sinks, qkv, first, keys, values, pages, space, counters, out
        )

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(run, range(num_threads)))
    return out.reshape(queries.shape)
