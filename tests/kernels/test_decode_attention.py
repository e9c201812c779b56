"""Decode attention over a paged cache, in all its formats and on a GPU, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hotcold.numba_kernels.decode.attention import (
    SEGMENT_POSITIONS,
    attend_segment,
    read_page,
    store_kernel,
)
from tests.kernels import backends, numba_calls, reference
from tests.kernels.arrays import random_floats
from tests.kernels.layer_numbers import layer_numbers
from tests.kernels.prefill_texts import a_text, numbers_in, paged

PAGE = 64
KINDS = ["f32", "f16", "q8"]
_DTYPES = {"f32": np.float32, "f16": np.uint16, "q8": np.int8}


def cached(rows: np.ndarray, kind: str, pages: np.ndarray) -> np.ndarray:
    """(M, G, PAGE, row): rows (G, P, hd) stored one by one, the rest of the pool NaN or garbage."""
    num_groups, length, dim = rows.shape
    width = dim + 4 * -(-dim // 32) if kind == "q8" else dim
    pool = np.empty((pages.max() + 2, num_groups, PAGE, width), _DTYPES[kind])
    pool.view(np.uint8)[:] = 0xFF  # NaN as a number, and as a scale
    for group in range(num_groups):
        for p in range(length):
            store_kernel(pool, pages[p // PAGE], group, p % PAGE, rows[group], p, 0, dim)
    return pool


def read(pool: np.ndarray, pages: np.ndarray, length: int, dim: int) -> np.ndarray:
    """What the cache says that it holds: (G, length, dim) float32."""
    out = np.empty((pool.shape[1], pages.size * PAGE, dim), np.float32)
    for head, rows in enumerate(out):
        for i, page in enumerate(pages):
            read_page(pool, page, head, 0, PAGE, dim, rows[i * PAGE : (i + 1) * PAGE])
    return out[:, :length]


def shuffled_pages(length: int) -> np.ndarray:
    count = -(-length // PAGE)
    return np.random.default_rng(length).permutation(count + 3)[:count].astype(np.int32)


@pytest.mark.parametrize(
    ("way", "kind"),
    [("numba", kind) for kind in KINDS] + [(way, k) for way in backends.DEVICES for k in KINDS[:2]],
)
def test_random_caches(way: str, kind: str, request: pytest.FixtureRequest) -> None:
    """Lengths on both sides of pages and segments; sinks below, among and far above the scores.

    What no page of the sequence holds, lies behind its end or before its window is NaN, and pages
    in any order give the same bits.
    """
    attend: Callable[..., np.ndarray] = numba_calls.decode_attention
    if way != "numba":
        attend = backends.calls(way, request).decode_attention
    rng, is_slow = np.random.default_rng(1), way == "emulated"
    for num_heads, num_groups in [(n, 1) for n in range(1, 9)] + [(6, 2), (9, 3), (4, 4)]:
        dim = int(rng.choice([1, 3, 16, 20, 40, 64, 128]))
        length = int(rng.choice([257, 320] if is_slow else [257, 1100, 5000]))
        text = a_text(_DTYPES[kind], length, (num_heads, num_groups), dim)
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
    rows = random_floats(1, 2, 100, dim) * np.exp(random_floats(2, 2, 100, dim) * 4)
    rows[0, 7] = 0
    pages = shuffled_pages(100)
    pool = cached(rows, "q8", pages)
    found = read(pool, pages, 100, dim)
    for first in range(0, dim, 32):
        own, kept = rows[..., first : first + 32], found[..., first : first + 32]
        largest = np.abs(own).max(axis=2, keepdims=True)
        assert (np.abs(kept - own) <= largest / 127 * 0.5001).all() and not kept[0, 7].any()
        np.testing.assert_allclose(np.abs(kept).max(axis=2), largest[..., 0], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [0, 300])
def test_tokens_of_one_sequence_have_the_bits_of_each_alone(kind: str, window: int) -> None:
    """Even where a later token's key and value are not finite."""
    dim, num_heads, num_groups, length, num_tokens = 48, 6, 2, 600, 5
    heads, pages = num_heads // num_groups, shuffled_pages(length)
    rows = [random_floats(seed, num_groups, length, dim) for seed in (2, 3)]
    for each in rows:
        each[:, -1] = np.inf
    keys, values = (cached(each, kind, pages) for each in rows)
    qkv = random_floats(1, num_tokens, (num_heads + 2 * num_groups) * dim)
    facts = {"head_dim": dim, "num_heads": num_heads, "num_kv_heads": num_groups, "scale": 0.2}
    numbers = layer_numbers(**facts, window=window)
    positions = np.arange(length - num_tokens, length, dtype=np.int32)
    size = SEGMENT_POSITIONS

    def run(segment: int, group: int, first: int, count: int) -> np.ndarray:
        scores, sums = np.zeros((64, size), np.float32), np.zeros((64, dim), np.float32)
        totals = np.zeros((64, 2), np.float32)
        attend_segment(
            numbers, keys, values, group, pages, segment, positions, first, count, qkv, scores,
            sums, totals,
        )  # fmt: skip
        return np.concatenate([sums, totals], axis=1)[: count * heads]

    for segment in range(3):
        for group in range(num_groups):
            together = run(segment, group, 0, num_tokens)
            alone = [run(segment, group, t, 1) for t in range(num_tokens)]
            np.testing.assert_array_equal(together, np.concatenate(alone))
            assert np.isfinite(together[: (num_tokens - 1) * heads]).all()
