"""Kernels over quantized rows, against the numbers that their bytes stand for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hotcold.numba_kernels.load.convert import to_bfloat16, to_float32
from tests.kernels import reference
from tests.kernels.arrays import random_floats
from tests.kernels.quantized_rows import (
    IN_BLOCKS,
    IN_LAYERS,
    KINDS,
    KINDS_AND_WIDTHS,
    SUMMED,
    quantized_vectors,
    random_rows,
)

pytestmark = pytest.mark.sweep(kind=["q8", "q4"])

kinds = pytest.mark.parametrize("kind", KINDS)
kinds_and_widths = pytest.mark.parametrize(("kind", "width"), KINDS_AND_WIDTHS)


@kinds_and_widths
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 9])
def test_rows_times_vectors(
    backend: SimpleNamespace, kind: str, width: int, num_tokens: int
) -> None:
    rows = random_rows(1, kind, 27, width)
    x, bias = random_floats(2, num_tokens, width), random_floats(3, 27)
    found = backend.gemv(rows.rows, x, bias)
    sizes = np.abs(x.astype(np.float64)) @ rows.sizes.T
    expected = quantized_vectors(x) @ rows.weights.T + bias
    assert (np.abs(found - expected) <= 1e-6 * sizes + 1e-6).all()
    # Rounding x to 8 bits moves a product by no more than half a step a number.
    steps = np.abs(x.reshape(num_tokens, -1, 32)).max(axis=2).repeat(32, axis=1) / 127
    exact = x.astype(np.float64) @ rows.weights.T + bias
    assert (np.abs(found - exact) <= 0.51 * steps @ np.abs(rows.weights).T + 1e-6 * sizes).all()


@pytest.mark.parametrize(("kind", "width"), [("q4", 129 * 512 + 32), ("q6", 65 * 512 + 256)])
def test_rows_whose_sums_wait_in_several_turns(
    backend: SimpleNamespace, kind: str, width: int
) -> None:
    rows, x = random_rows(5, kind, 3, width), random_floats(6, 1, width)
    found = backend.gemv(rows.rows, x, None)
    expected = quantized_vectors(x) @ rows.weights.T
    assert (np.abs(found - expected) <= 1e-6 * np.abs(x.astype(np.float64)) @ rows.sizes.T).all()


@kinds_and_widths
def test_widening(kind: str, width: int) -> None:
    rows = random_rows(4, kind, 5, width)
    assert (to_float32(rows.rows) == rows.weights.astype(np.float32)).all()
    expected = reference.narrowed(rows.weights.astype(np.float32), np.int16)
    assert (to_bfloat16(rows.rows) == expected).all()


@pytest.mark.parametrize(
    ("kind", "width"), [case for case in KINDS_AND_WIDTHS if case[0] in IN_LAYERS]
)
@pytest.mark.parametrize("num_tokens", [1, 3, 32])
@pytest.mark.parametrize("gated", [True, False], ids=["three", "two"])
def test_sparse_ffn(
    backend: SimpleNamespace, kind: str, width: int, num_tokens: int, gated: bool
) -> None:
    gate, up = (random_rows(seed, kind, 70, width) for seed in (5, 6))
    down = random_rows(7, kind if kind in SUMMED else "q8", 70, width)
    x = random_floats(8, num_tokens, width)
    ids = np.random.default_rng(9).permutation(70)[:33].astype(np.int32)
    for listed in (None, ids):
        found, fired = backend.sparse_ffn(
            gate.rows, up.rows if gated else None, down.rows, x, listed
        )
        keep = np.arange(70) if listed is None else listed
        rounded = quantized_vectors(x)
        h = np.maximum(rounded @ gate.weights[keep].T, 0)
        assert fired.tolist() == keep[(h > 0).any(axis=0)].tolist()
        sizes = (np.abs(rounded) @ gate.sizes[keep].T) * (h > 0)
        sizes = sizes * (np.abs(rounded) @ up.sizes[keep].T) if gated else sizes
        h = h * (rounded @ up.weights[keep].T) if gated else h
        limit = 4e-6 * (sizes @ down.sizes[keep]) + 1e-5
        assert (np.abs(found - h @ down.weights[keep]) <= limit).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@kinds
def test_what_is_not_finite_stays_so(backend: SimpleNamespace, kind: str, bad: float) -> None:
    width = 768 if kind in IN_BLOCKS else 544
    rows = random_rows(10, kind, 9, width)
    x = random_floats(11, 2, width)
    x[1, width - 1] = bad
    found = backend.gemv(rows.rows, x)
    assert np.isfinite(found[0]).all()
    assert not np.isfinite(found[1]).any()


@kinds
def test_zeros(backend: SimpleNamespace, kind: str) -> None:
    width = 256 if kind in IN_BLOCKS else 96
    rows = random_rows(12, kind, 9, width)
    assert (backend.gemv(rows.rows, np.zeros((3, width), np.float32)) == 0).all()


def test_a_width_without_whole_groups_is_refused(backend: SimpleNamespace) -> None:
    rows = random_rows(13, "q8", 2, 64).rows
    with pytest.raises(ValueError, match="no row of groups"):
        backend.gemv(rows[:, :-1], np.zeros((1, 64), np.float32))
