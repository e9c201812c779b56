"""Texts for attention of prompts, and chunks of them through the kernel on a paged cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.numba_kernels.prompt.prompt_attention import (
    prompt_attention_kernel,
    prompt_scratch_shapes,
)
from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL
from tests.kernels.arrays import random_bits, random_floats
from tests.kernels.layer_numbers import layer_numbers

NAN = {np.float32: np.nan, np.uint16: 0x7E00}


class Text(NamedTuple):
    """Queries (P, H, hd) of all positions; keys and values (G, P, hd)."""

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
    keys = random_bits(2, dtype, num_kv_heads, length, head_dim)
    return Text(queries, keys, random_bits(3, dtype, num_kv_heads, length, head_dim))


def paged(cache: np.ndarray, pages: np.ndarray, seen_from: int) -> np.ndarray:
    """(pages, G, PAGE_POSITIONS, hd) with NaN wherever no position from `seen_from` on is."""
    num_heads, length, head_dim = cache.shape
    whole = np.full((num_heads, len(pages) * PAGE_POSITIONS, head_dim), NAN[cache.dtype.type])
    whole[:, seen_from:length] = cache[:, seen_from:]
    pool = np.full((len(pages) + 3, num_heads, PAGE_POSITIONS, head_dim), NAN[cache.dtype.type])
    parts = whole.reshape(num_heads, len(pages), PAGE_POSITIONS, head_dim)
    pool[pages] = parts.transpose(1, 0, 2, 3)
    return pool.astype(cache.dtype)


def attend(
    text: Text,
    first: int = 0,
    last: int | None = None,
    *,
    num_threads: int = 1,
    window: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
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

    def run(thread: int) -> None:
        scratch = [aligned_empty(shape, np.float32) for shape in prompt_scratch_shapes(head_dim)]
        for array in scratch:
            array[:] = np.nan
        prompt_attention_kernel(numbers, qkv, first, keys, values, pages, *scratch, counters, out)

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(run, range(num_threads)))
    return out.reshape(queries.shape)
