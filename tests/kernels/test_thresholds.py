"""Neurons that fire only where they pass thresholds, of gates and of products, token by token."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hotcold.numba_kernels.decode.activations import ALL_FIRE, Thresholds
from hotcold.numba_kernels.load.convert import row_lengths, to_float32
from tests.kernels import reference
from tests.kernels.arrays import BITS
from tests.kernels.quantized_rows import IN_BLOCKS, IN_LAYERS, KINDS, SUMMED, random_rows
from tests.kernels.test_batch_mates import random_weights
from tests.kernels.test_ffn import Case, make_case

pytestmark = pytest.mark.sweep(kind=["f32", "q4"])

NAN = {"f32": np.nan, "f16": 0x7E00, "bf16": 0x7FC0}


def in_a_gap(sizes: np.ndarray, share: float) -> np.float32:
    """A threshold that about this share of positive numbers does not pass, far from all of them."""
    ordered = np.sort(sizes.ravel())
    first, last = (int(ordered.size * at) for at in (share - 0.05, share + 0.05))
    at = first + int(np.diff(ordered[first : last + 1]).argmax())
    return np.float32((ordered[at] + ordered[at + 1]) / 2)


def with_thresholds(case: Case, gate_share: float = 0.3, product_share: float = 0.6) -> Case:
    """With thresholds such that the second drops many neurons that pass the first."""
    gates = reference.gemv(case.gate, case.x, case.gate_bias)
    gates = np.abs(reference.activate(gates, case.activation_fn))
    norms = np.linalg.norm(reference.widened(case.down), axis=1)
    assert case.up is not None
    factors = reference.gemv(case.up, case.x, case.up_bias)
    products = gates * np.abs(factors) * norms
    found = Thresholds(in_a_gap(gates, gate_share), in_a_gap(products, product_share))
    return replace(case, thresholds=found, down_norms=norms.astype(np.float32))


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("num_tokens", [1, 3, 17, 32])
@pytest.mark.parametrize("activation_fn", ["silu", "gelu_tanh"])
def test_rows_of_small_neurons_are_not_read(
    backend: SimpleNamespace, kind: str, num_tokens: int, activation_fn: str
) -> None:
    """They hold NaN; there are several blocks of neurons, with some left over for the next."""
    shares = {1: (0.4, 0.7), 3: (0.7, 0.9)}.get(num_tokens, (0.94, 0.94))
    case = replace(make_case(kind, 700, 64, num_tokens, bias=True), activation_fn=activation_fn)
    case = with_thresholds(case, *shares)
    expected, fired = case.run(reference)
    assert case.up is not None and case.thresholds is not None
    gates = reference.gemv(case.gate, case.x, case.gate_bias)
    passed = np.abs(reference.activate(gates, activation_fn)) > case.thresholds.gate
    silent = np.flatnonzero(~passed.any(axis=0))
    assert 0 < fired.size < 700 - silent.size and silent.size
    up, down = case.up.copy(), case.down.copy()
    up[silent] = NAN[kind]
    down[np.setdiff1d(np.arange(700), fired)] = NAN[kind]
    found, found_fired = replace(case, up=up, down=down).run(backend)
    assert found_fired.tolist() == fired.tolist()
    assert (np.abs(found - expected) <= 4e-6 * case.sizes()).all()


@pytest.mark.parametrize("kind", [*BITS, *IN_LAYERS])
def test_a_token_does_not_depend_on_its_batch_mates(backend: SimpleNamespace, kind: str) -> None:
    width = 256 if kind in IN_BLOCKS else 64
    gate, up = (random_weights(seed, kind, 333, width) for seed in (3, 4))
    down = random_weights(5, "q8" if kind in KINDS and kind not in SUMMED else kind, 333, width)
    x = np.random.default_rng(6).standard_normal((32, width), np.float32)
    case = Case(gate, up, down, x, activation_fn="silu", down_norms=row_lengths(down))
    case = replace(case, thresholds=Thresholds(np.float32(0.6), np.float32(40)))
    for num_tokens in (2, 5, 32):
        together, _ = replace(case, x=x[:num_tokens]).run(backend)
        for t in range(num_tokens):
            alone, _ = replace(case, x=x[t : t + 1]).run(backend)
            np.testing.assert_array_equal(together[t], alone[0])
    whole, _ = replace(case, thresholds=None).run(backend, skip_silent=False)
    assert np.abs(whole - together).max() > 0.01 * np.abs(whole).max()


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("ids", [None, np.arange(5, 90, 3, dtype=np.int32)], ids=["all", "listed"])
def test_thresholds_of_zero_change_no_bit(
    backend: SimpleNamespace, num_tokens: int, ids: np.ndarray | None
) -> None:
    case = replace(make_case("f16", 97, 64, num_tokens), activation_fn="silu", ids=ids)
    case = replace(case, down_norms=row_lengths(case.down))
    expected, _ = case.run(backend, skip_silent=False)
    for thresholds in (Thresholds(np.float32(0), np.float32(0)), ALL_FIRE):
        found, _ = replace(case, thresholds=thresholds).run(backend)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("place", ["gate", "up"])
def test_nan_passes(backend: SimpleNamespace, num_tokens: int, place: str) -> None:
    case = replace(make_case("f32", 9, 33, num_tokens), activation_fn="silu")
    thresholds = Thresholds(np.float32(0 if place == "up" else 1e9), np.float32(1e9))
    case = replace(case, thresholds=thresholds, down_norms=np.ones(9, np.float32))
    getattr(case, place)[4] = np.nan
    out, fired = case.run(backend)
    assert np.isnan(out).all() and fired.tolist() == [4]


@pytest.mark.parametrize("kind", [*BITS, *IN_LAYERS])
def test_row_lengths(kind: str) -> None:
    if kind in KINDS:
        rows = random_rows(2, kind, 300, 256 if kind in IN_BLOCKS else 96).rows
    else:
        rows = random_weights(2, kind, 300, 96)
    expected = np.linalg.norm(to_float32(rows).astype(np.float64), axis=1)
    assert row_lengths(rows).dtype == np.float32
    np.testing.assert_allclose(row_lengths(rows), expected, rtol=1e-6)
    assert row_lengths(rows[:0]).shape == (0,)
