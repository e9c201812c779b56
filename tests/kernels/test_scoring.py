"""Likelihoods and divergences of logits, against SciPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from hotcold.numba_kernels.decode.scoring import compare_logits, negative_log_likelihood
from tests.kernels.arrays import random_floats

pytestmark = pytest.mark.sweep

SIZES = [1, 2, 65, 5000]
SCALES = [0.01, 3.0, 200.0]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size", SIZES)
def test_equals_scipy(size: int, scale: float) -> None:
    for seed in range(5):
        dense = random_floats(seed, size) * np.float32(scale)
        other = dense + random_floats(100 + seed, size) * np.float32(scale * 0.3)
        target = (7 * seed) % size
        found = compare_logits(dense, other, target)
        log_p = log_softmax(dense.astype(np.float64))
        log_q = log_softmax(other.astype(np.float64))
        kld = float(np.sum(np.exp(log_p) * (log_p - log_q)))
        assert found.nll_dense == pytest.approx(-log_p[target], rel=1e-12, abs=1e-12)
        assert found.nll == pytest.approx(-log_q[target], rel=1e-12, abs=1e-12)
        assert found.kld == pytest.approx(kld, rel=1e-12, abs=1e-12)
        assert found.same_top == (dense.argmax() == other.argmax())
        assert negative_log_likelihood(other, target) == found.nll


def test_large_logits_and_differences_below_float32() -> None:
    """A shift of all logits changes nothing, and a change in the last bit shows."""
    dense = random_floats(3, 1000)
    shifted = (dense * 8).round() / 8  # exact in float32, shifted or not
    found = compare_logits(shifted, shifted + np.float32(4096), 5)
    assert found.kld == pytest.approx(0, abs=1e-11)
    assert found.nll == pytest.approx(found.nll_dense, rel=1e-12)
    assert found.same_top
    dense = np.array([4096, 4096, 4095], np.float32)
    other = np.nextafter(dense, np.array([np.inf, 4096, 4095], np.float32))
    step = float(other[0]) - 4096
    p = softmax([0.0, 0.0, -1.0])[0]
    third_order = p * (1 - p) * (1 - 2 * p) * step**3 / 6
    expected = p * (1 - p) * step**2 / 2 + third_order  # of the divergence's series in `step`
    assert compare_logits(dense, other, 2).kld == pytest.approx(expected, rel=1e-5)
    assert compare_logits(dense, dense, 2).kld == 0


def test_tokens_that_dense_rules_out_do_not_count() -> None:
    dense = np.array([0, -np.inf, 1], np.float32)
    other = np.array([0, 5, 1], np.float32)
    p = softmax([0.0, 1.0])
    q = softmax([0.0, 5.0, 1.0])[[0, 2]]
    found = compare_logits(dense, other, 0)
    assert found.kld == pytest.approx(np.sum(p * np.log(p / q)), rel=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 3, 99])
def test_what_is_not_finite_is_refused(at: int, bad: float) -> None:
    good, broken = random_floats(1, 100), random_floats(2, 100)
    broken[at] = bad
    for first, second in ((good, broken), (broken, good), (broken, broken)):
        with pytest.raises(ValueError, match="NaN"):
            compare_logits(first, second, 7)
    with pytest.raises(ValueError, match="NaN"):
        negative_log_likelihood(broken, 7)
    nothing = np.full(100, -np.inf, np.float32)
    with pytest.raises(ValueError, match="NaN"):
        negative_log_likelihood(nothing, 7)
