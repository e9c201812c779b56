"""Norms, rotary positions and decode attention against the reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.kernels import reference
from tests.kernels.arrays import random_bits, random_floats

pytestmark = pytest.mark.sweep

WIDTHS = [1, 3, 16, 17, 100, 4096]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("epsilon", [1e-5, 1e-2])
def test_rms_norm(backend: SimpleNamespace, width: int, epsilon: float) -> None:
    x, weight = random_floats(1, width) * 3 + 1, random_floats(2, width)
    found = backend.rms_norm(x, weight, epsilon)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, reference.rms_norm(x, weight, epsilon), rtol=3e-6)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm(backend: SimpleNamespace, width: int, has_bias: bool) -> None:
    x, weight = random_floats(1, width) * 3 + 10, random_floats(2, width)
    bias = random_floats(3, width) if has_bias else None
    expected = reference.layer_norm(x, weight, bias, 1e-3)
    found = backend.layer_norm(x, weight, bias, 1e-3)
    assert found.dtype == np.float32
    # the mean, 10, is rounded to float32 before it is taken off
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_norms_let_nan_through(backend: SimpleNamespace) -> None:
    x = np.ones(20, np.float32)
    x[7] = np.nan
    assert np.isnan(backend.rms_norm(x, np.ones_like(x), 1e-5)).all()
    assert np.isnan(backend.layer_norm(x, np.ones_like(x), None, 1e-5)).all()


@pytest.mark.parametrize("head_dim", [2, 6, 20, 64, 128])
def test_rope(backend: SimpleNamespace, head_dim: int) -> None:
    heads, frequencies = random_floats(1, 3, head_dim), 1e4 ** -np.linspace(0, 1, head_dim // 2)
    table = backend.rope_table(frequencies.astype(np.float32), 50)
    assert table.dtype == np.float32 and table.shape == (50, 2, head_dim // 2)
    expected_table = reference.rope_table(frequencies, 50)
    np.testing.assert_allclose(table, expected_table, atol=1e-5)
    before = heads.copy()
    for position in (0, 1, 49):
        expected = reference.rope(heads, expected_table[position])
        found = backend.rope(heads, table[position])
        np.testing.assert_allclose(found, expected, atol=3e-5)
    np.testing.assert_array_equal(heads, before)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16], ids=["f32", "f16"])
@pytest.mark.parametrize("window", [1, 3, 64, 100, 128, 130, 256, 400])
@pytest.mark.parametrize("softcap", [0.0, 2.5])
def test_windows_and_softcaps(
    backend: SimpleNamespace, dtype: type, window: int, softcap: float
) -> None:
    """What lies before the window holds NaN: it is not read. Lengths on both sides of pages."""
    queries = random_floats(1, 4, 20)
    keys, values = (random_bits(seed, dtype, 2, 320, 20) for seed in (2, 3))
    changes: dict[str, Any] = {"window": window, "softcap": softcap, "scale": 0.4}
    for length in (1, 2, window, window + 1, 128, 129, 255, 257, 320):
        length = min(length, 320)
        expected = reference.decode_attention(queries, keys, values, length, **changes)
        unread = [cache.copy() for cache in (keys, values)]
        for cache in unread:
            cache[:, : max(0, length - window)] = np.nan if dtype == np.float32 else 0x7E00
        paged = [
            np.ascontiguousarray(cache.reshape(2, 5, 64, 20).transpose(1, 0, 2, 3))
            for cache in unread
        ]
        pages = np.arange(5, dtype=np.int32)
        found = backend.decode_attention(queries, *paged, length, pages, **changes)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16], ids=["f32", "f16"])
@pytest.mark.parametrize("page_size", [4, 8, 64])
def test_pages_in_any_order_give_the_same_bits(
    backend: SimpleNamespace, dtype: type, page_size: int
) -> None:
    """What no page of the sequence holds, and what lies behind its end, is not read."""
    num_pages = -(-150 // page_size)
    length = num_pages * page_size
    queries = random_floats(1, 6, 20)
    keys, values = random_bits(2, dtype, 2, length, 20), random_bits(3, dtype, 2, length, 20)
    pages = np.random.default_rng(5).permutation(num_pages + 3)[:num_pages].astype(np.int32)

    def paged(cache: np.ndarray) -> np.ndarray:
        nan = np.nan if dtype == np.float32 else 0x7E00
        pool: np.ndarray = np.full((num_pages + 3, 2, page_size, 20), nan, dtype)
        pool[pages] = cache.reshape(2, num_pages, page_size, 20).transpose(1, 0, 2, 3)
        return pool

    for used in (1, 3, 4, 63, 64, 65, 127, 150):
        expected = backend.decode_attention(queries, keys, values, used)
        found = backend.decode_attention(
            queries, paged(keys), paged(values), used, pages[: -(-used // page_size)]
        )
        np.testing.assert_array_equal(found, expected)
