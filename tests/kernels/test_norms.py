"""Norms and rotary positions against the reference."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.kernels import reference
from tests.kernels.arrays import random_floats

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
