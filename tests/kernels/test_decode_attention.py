"""Decode attention over a paged cache, in all its formats and on a GPU, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hotcold.numba_kernels.decode.attention import (
    SEGMENT_POSITIONS,
    attend_segment,
    first_seen,
    merge_segments,
    num_segments,
    read_page,
    store_kernel,
)
from hotcold.numba_kernels.decode.vectors import NO_BIAS
from tests.kernels import backends, reference
from tests.kernels.arrays import random_floats
from tests.kernels.layer_numbers import layer_numbers
from tests.kernels.prefill_texts import DTYPES, a_text, numbers_in, paged

PAGE = 64


def by_numba(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    length: int,
    pages: np.ndarray,
    *,
    window: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """By Numba's kernels, with the arguments of a device's."""
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
    totals, own_sinks = np.empty((heads, 2), np.float32), NO_BIAS if sinks is None else sinks
    for part, group in itertools.product(range(count), range(num_groups)):
        attend_segment(
            numbers, keys, values, group, pages, first + part, positions, 0, 1, qkv, scores, sums,
            totals,
        )  # fmt: skip
        own = slice(group * heads, (group + 1) * heads)
        part_sums[part].reshape(num_heads, dim)[own], part_totals[part, own] = sums, totals
    for head in range(num_heads):
        merge_segments(count, part_sums, part_totals, own_sinks, head, dim, out)
    return out.reshape(queries.shape)


@pytest.mark.parametrize(
    ("way", "kind"),
    [("numba", kind) for kind in DTYPES]
    + [(way, k) for way in backends.DEVICES for k in ("f32", "f16")],
)
def test_random_caches(way: str, kind: str, request: pytest.FixtureRequest) -> None:
    """Lengths on both sides of pages and segments; sinks below, among and far above the scores.

    What no page of the sequence holds, lies behind its end or before its window is NaN, and pages
    in any order give the same bits.
    """
    attend: Callable[..., np.ndarray] = by_numba
    if way != "numba":
        attend = backends.calls(way, request).decode_attention
    rng, is_slow = np.random.default_rng(1), way == "emulated"
    for num_heads, num_groups in [(n, 1) for n in range(1, 9)] + [(6, 2), (9, 3), (4, 4)]:
        dim = int(rng.choice([1, 3, 16, 20, 40, 64, 128]))
        length = int(rng.choice([257, 320] if is_slow else [257, 1100, 5000]))
        text = a_text(DTYPES[kind], length, (num_heads, num_groups), dim)
        k, v = numbers_in(text.keys), numbers_in(text.values)
        lengths = {1, 3, 63, 64, 65, 128, 255, 256, 257, min(length, 513), length}
        for used in rng.permutation(list(lengths))[: 4 if is_slow else 11].tolist():
            options: dict[str, Any] = {
                "window": int(rng.choice([0, 1, 3, 64, 130, 200, 256, 1000])),
                "softcap": float(rng.choice([0.0, 2.5, 50.0])),
                "scale": float(rng.choice([dim**-0.5, 0.3])),
            }
            if way == "numba" and rng.random() < 0.5:
                options["sinks"] = rng.choice([-70, 1, 5, 300], num_heads).astype(np.float32)
            queries = text.queries[used - 1]
            expected = reference.decode_attention(queries, k, v, used, **options)
            first, found = max(0, used - options["window"]) if options["window"] else 0, []
            for _ in range(2):
                pages = rng.permutation(-(-used // PAGE) + 3)[: -(-used // PAGE)].astype(np.int32)
                rows = [paged(each[:, :used], pages, first) for each in (text.keys, text.values)]
                found.append(attend(queries, *rows, used, pages, **options))
            np.testing.assert_allclose(found[0], expected, atol=2e-5)
            np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("dim", [1, 3, 16, 20, 32, 64, 80, 128, 256])
def test_rows_in_8_bits(dim: int) -> None:
    """Within half a step of the scale of 32 items; zeros stay zeros; the largest is kept."""
    rows = random_floats(1, PAGE, dim) * np.exp(random_floats(2, PAGE, dim) * 4)
    rows[7] = 0
    cache = np.full((1, 1, PAGE, dim + 4 * -(-dim // 32)), -1, np.int8)
    for place in range(PAGE):
        store_kernel(cache, 0, 0, place, rows, place, 0, dim)
    found = np.empty_like(rows)
    read_page(cache, 0, 0, 0, PAGE, dim, found)
    for first in range(0, dim, 32):
        own, kept = rows[:, first : first + 32], found[:, first : first + 32]
        largest = np.abs(own).max(axis=1, keepdims=True)
        assert (np.abs(kept - own) <= largest / 127 * 0.5001).all() and not kept[7].any()
        np.testing.assert_allclose(np.abs(kept).max(axis=1), largest[:, 0], rtol=1e-6)
