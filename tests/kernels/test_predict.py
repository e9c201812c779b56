"""Scores of neurons and the list of those above zero, against float64 NumPy from the formulas."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hotcold.numba_kernels.decode.predict import (
    lowrank_hidden_kernel,
    lowrank_scores_kernel,
    pack_weights,
    select_kernel,
    sign_scores,
)
from tests.kernels.arrays import random_bits, random_floats
from tests.kernels.reference import widened

pytestmark = pytest.mark.sweep

WIDTHS = [1, 63, 64, 65, 384, 4096]
TIE = 1e-4  # of a level: float32 may round a number so close to the middle of two either way


def unpacked(words: np.ndarray, width: int) -> np.ndarray:
    """Bits (..., width) of rows of words, bit by bit."""
    items = np.arange(width)
    return (words[..., items // 64] >> (items % 64).astype(np.uint64)) & np.uint64(1)


def expected_weights(weights: np.ndarray, num_planes: int) -> np.ndarray:
    """The levels that the packing stands for, by comparing."""
    wide = weights.astype(np.float64)
    signs = np.where(wide > 0, 1, -1)
    if num_planes == 1:
        return signs
    rms = np.sqrt((wide**2).mean(axis=1, keepdims=True))
    return signs * np.where(np.abs(wide) > 0.9957 * rms, 3, 1)


def weights_of_two_sizes(seed: int, height: int, width: int) -> np.ndarray:
    """Rows whose items are clearly smaller or clearly larger than their root mean square."""
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0.5, 1.5], (height, width)) + rng.uniform(0, 0.2, (height, width))
    return (sizes * rng.choice([-1, 1], (height, width))).astype(np.float32)


def expected_levels(values: np.ndarray) -> tuple[float, np.ndarray, int]:
    """The unit, each value's nearest odd number in -7..7 of it, and how many lie near a tie."""
    unit = math.sqrt((values**2).mean()) * 2.5 / 7
    scaled = values / unit
    levels = np.clip(2 * np.floor(scaled / 2) + 1, -7, 7)
    ties = np.abs(scaled / 2 - np.round(scaled / 2)) < TIE
    return unit, levels, int(ties.sum())


@pytest.mark.parametrize("num_planes", [1, 2])
@pytest.mark.parametrize("width", WIDTHS)
def test_sign_scores(width: int, num_planes: int) -> None:
    num_tokens, height = 3, 41
    weights = weights_of_two_sizes(width, height, width)
    x, center = random_floats(1, num_tokens, width), 0.5 * random_floats(2, width)
    scale = np.exp(random_floats(3, width))
    thresholds = random_floats(4, height)
    thresholds[3], thresholds[5] = np.inf, -np.inf
    found = sign_scores(pack_weights(weights, num_planes), x, thresholds, center, scale)
    assert found.dtype == np.float32 and found.shape == (num_tokens, height)
    levels = expected_weights(weights, num_planes)
    for t in range(num_tokens):
        unit, q, num_ties = expected_levels((x[t].astype(np.float64) - center) * scale)
        assert num_ties < 0.001 * width + 1
        expected = unit * (levels @ q) - thresholds
        slack = 2 * unit * 3 * num_ties + 1e-5 * (unit * np.abs(q).sum() + 1)
        finite = np.isfinite(thresholds)
        assert (np.abs(found[t, finite] - expected[finite]) <= slack).all()
        assert found[t, 3] == -np.inf and found[t, 5] == np.inf


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_an_input_that_is_not_finite_selects_every_neuron(value: float) -> None:
    x = random_floats(0, 1, 70)
    x[0, 5] = value
    bits = pack_weights(random_floats(2, 9, 70), 1)
    thresholds = np.full(9, np.inf, np.float32)
    zeros, ones = np.zeros(70, np.float32), np.ones(70, np.float32)
    assert np.isnan(sign_scores(bits, x, thresholds, zeros, ones)).all()


def lowrank_arrays(dtype: type, size: int, width: int, height: int) -> tuple[np.ndarray, ...]:
    """down, scales, up, thresholds."""
    if dtype is np.int8:
        rng = np.random.default_rng(size)
        down, up = (
            rng.integers(-127, 128, shape, dtype=np.int8)
            for shape in ((size, width), (size, height))
        )
    else:
        down, up = random_bits(1, np.uint16, size, width), random_bits(2, np.uint16, size, height)
    scales = np.exp(random_floats(3, size))
    return down, scales, up, random_floats(4, height)


@pytest.mark.parametrize("dtype", [np.uint16, np.int8])
@pytest.mark.parametrize(("size", "width", "height"), [(1, 1, 1), (6, 65, 33), (16, 384, 200)])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_lowrank(dtype: type, size: int, width: int, height: int, num_tokens: int) -> None:
    down, scales, up, thresholds = lowrank_arrays(dtype, size, width, height)
    x = random_floats(5, num_tokens, width)
    hidden = np.full((num_tokens, size), np.nan, np.float32)
    cuts = [0, size // 3, size // 2 + 1, size]
    for first, last in pairwise(cuts):
        lowrank_hidden_kernel(down, scales, x, hidden, first, last)
    products = x.astype(np.float64) @ widened(down).T
    expected = scales * np.maximum(products, 0)
    sums = scales * (np.abs(x).astype(np.float64) @ np.abs(widened(down)).T)
    assert (np.abs(hidden - expected) <= 1e-6 * sums).all()
    if size > 1:
        assert (hidden == 0).any() and (hidden > 0).any()
    for t in range(num_tokens):
        scores = np.full(height, np.nan, np.float32)
        for first, last in ((0, height // 2), (height // 2, height)):
            lowrank_scores_kernel(up, hidden[t], thresholds, scores, first, last)
        wanted = hidden[t].astype(np.float64) @ widened(up) - thresholds
        size_of_sums = hidden[t] @ np.abs(widened(up)) + np.abs(thresholds)
        assert (np.abs(scores - wanted) <= 2e-6 * size_of_sums).all()


SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0]


@st.composite
def scores_and_part(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    num_tokens = draw(st.sampled_from([1, 2, 31, 32]))
    shape = (num_tokens, draw(st.integers(0, 12)))
    scores = draw(hnp.arrays(np.float32, shape, elements=st.sampled_from(SPECIAL).map(np.float32)))
    begin, end = sorted(draw(st.tuples(*[st.integers(0, shape[1])] * 2)))
    return scores, begin, end


@settings(max_examples=150)
@given(scores_and_part())
def test_select(case: tuple[np.ndarray, int, int]) -> None:
    scores, begin, end = case
    ids, token_masks = np.full(20, -7, np.int32), np.full(20, 7, np.uint32)
    count = select_kernel(scores, begin, end, ids, token_masks)
    wanted = {
        n - begin: sum(
            1 << t for t, score in enumerate(scores[:, n]) if score > 0 or math.isnan(score)
        )
        for n in range(begin, end)
    }
    expected = [(n, mask) for n, mask in wanted.items() if mask]
    assert ids[:count].tolist() == [n for n, _ in expected]
    if scores.shape[0] > 1:
        assert token_masks[:count].tolist() == [mask for _, mask in expected]
    assert (ids[max(count, end - begin) :] == -7).all()
