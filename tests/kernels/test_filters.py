"""Which token the filters of few requests draw: against plain lists in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from hotcold.numba_kernels.decode.filters import sample_filtered, sample_mirostat
from hotcold.numba_kernels.decode.sampling import sample
from tests.kernels.arrays import random_floats
from tests.kernels.reference import mirostat_shares, sample_shares

pytestmark = pytest.mark.sweep

ALMOST_ONE = float(np.nextafter(1.0, 0.0))
EDGES = (0.0, 1e-9, 0.25, 0.5, 0.75, 0.999999, ALMOST_ONE)
FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_n_sigma": 1.0},
    {"temperature": 3.0, "top_n_sigma": 2.5},
    {"temperature": 1.5, "top_n_sigma": 1.0, "top_k": 3},
    {"temperature": 1.0, "typical_p": 0.2},
    {"temperature": 0.7, "typical_p": 0.9},
    {"temperature": 1.0, "typical_p": 0.0},
    {"temperature": 1.3, "typical_p": 0.6, "top_k": 12, "top_p": 0.8},
    {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.02},
    {"temperature": 1.6, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.51},
    {"temperature": 1.0, "xtc_probability": 0.3, "xtc_threshold": 0.0},
    {"temperature": 0.8, "xtc_probability": 0.5, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {
        "temperature": 1.4, "top_n_sigma": 2.0, "top_k": 30, "typical_p": 0.9, "top_p": 0.9,
        "min_p": 0.02, "xtc_probability": 0.4, "xtc_threshold": 0.06,
    },
]  # fmt: skip


def drawn(logits: np.ndarray, options: dict[str, Any], count: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed).random((count, 2))
    ids = [
        sample_filtered(logits, **options, uniform=uniform, chance=chance)
        for uniform, chance in random.tolist()
    ]
    return np.bincount(ids, minlength=logits.size)


def assert_drawn_as(counts: np.ndarray, shares: np.ndarray) -> None:
    """By chi-square, with rare ids taken together; what has no share was never drawn."""
    assert not counts[shares == 0].any()
    expected = shares * counts.sum()
    rare = expected < 8
    bins = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    bins, wanted = bins[wanted > 0], wanted[wanted > 0]
    if bins.size > 1:
        assert chisquare(bins, wanted).pvalue > 1e-3


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_distribution(options: dict[str, Any]) -> None:
    logits = random_floats(7, 90) * 2
    assert_drawn_as(drawn(logits, options, 20_000, 2), sample_shares(logits, **options))


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 63, 65, 700])
def test_only_what_the_filters_keep_and_all_of_it(size: int, options: dict[str, Any]) -> None:
    logits = random_floats(size, size) * 2
    logits[size // 2 :: 7] = -np.inf if size > 2 else logits[size // 2 :: 7]
    shares = sample_shares(logits, **options)
    found = drawn(logits, options, 300, 3) > 0
    for uniform in EDGES:
        for chance in EDGES:
            found[sample_filtered(logits, **options, uniform=uniform, chance=chance)] = True
    assert not found[shares == 0].any()
    assert found[shares > 0.05].all()


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_an_even_grid_of_uniforms_meets_every_share_exactly(options: dict[str, Any]) -> None:
    logits = np.log(np.array([1, 4, 2, 8, 1], np.float64) / 16).astype(np.float32)
    logits += np.arange(5, dtype=np.float32) * np.float32(1e-3)  # no two alike
    shares = sample_shares(logits, **options | {"xtc_probability": 0.0})
    grid = (np.arange(4000) + 0.5) / 4000
    ids = [sample_filtered(logits, **options, uniform=float(one), chance=1.0) for one in grid]
    assert np.abs(np.bincount(ids, minlength=5) - 4000 * shares).max() <= 1.01


@pytest.mark.parametrize("size", [5, 3000])
def test_filters_that_are_off_keep_what_sample_keeps(size: int) -> None:
    """The same sets, so over many uniforms the same tokens; only their order may differ."""
    logits = random_floats(size, size) * 2
    off: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_p": 0.4},
        {"temperature": 2.0, "top_k": 17, "min_p": 0.01},
        {"temperature": 0.5},
    ]
    for options in off:
        uniforms = np.random.default_rng(5).random(2000).tolist()
        plain = {sample(logits, **options, uniform=one) for one in uniforms}
        assert plain >= set(np.flatnonzero(sample_shares(logits, **options) > 0.01).tolist())
        counts = drawn(logits, options, 2000, 5)
        assert_drawn_as(counts, sample_shares(logits, **options))


def test_xtc_keeps_one_of_the_likely_tokens() -> None:
    logits = np.log(np.array([0.05, 0.4, 0.3, 0.2, 0.05])).astype(np.float32)
    xtc = {"xtc_probability": 0.5, "xtc_threshold": 0.2 - 1e-6}
    options: dict[str, Any] = {"temperature": 1.0, **xtc}
    kept = {
        sample_filtered(logits, **options, uniform=one, chance=0.499)
        for one in np.linspace(0, ALMOST_ONE, 50).tolist()
    }
    assert kept == {0, 3, 4}
    assert sample_filtered(logits, **options, uniform=0.3, chance=0.5) == 1


@pytest.mark.parametrize(
    "options", [{"top_n_sigma": 1.0}, {"typical_p": 0.1}, {"xtc_probability": 1.0}]
)
def test_greedy_takes_the_likeliest(options: dict[str, Any]) -> None:
    logits = random_floats(1, 500)
    greedy: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 2.0, "top_k": 1}]
    for more in greedy:
        assert sample_filtered(logits, **options, **more, uniform=0.9) == int(np.argmax(logits))
    logits[3] = np.inf
    assert sample_filtered(logits, **options, temperature=1.0, uniform=0.9) == 3
    logits[4] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        sample_filtered(logits, **options, temperature=1.0, uniform=0.9)


MIROSTATS = [(1, 1.0), (1, 4.0), (1, 9.0), (2, 1.5), (2, 5.0), (2, 30.0), (2, -3.0), (1, -3.0)]


@pytest.mark.parametrize(("version", "mu"), MIROSTATS)
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_mirostat(version: int, mu: float, temperature: float) -> None:
    logits = random_floats(11, 400) * 2
    logits[::9] = -np.inf
    given: dict[str, Any] = {"version": version, "temperature": temperature, "mu": mu}
    shares = mirostat_shares(logits, **given)
    counts = np.zeros(logits.size, np.int64)
    for uniform in (*EDGES, *np.random.default_rng(4).random(8000).tolist()):
        token, surprise = sample_mirostat(logits, **given, uniform=uniform)
        assert surprise == pytest.approx(-math.log2(shares[token]), abs=1e-9)
        counts[token] += 1
    assert_drawn_as(counts, shares)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_of_odd_logits(version: int) -> None:
    given: dict[str, Any] = {"version": version, "mu": 10.0, "uniform": 0.5}
    one = np.full(20, -np.inf, np.float32)
    one[7] = 3.0
    assert sample_mirostat(one, temperature=1.0, **given) == (7, 0.0)
    assert sample_mirostat(random_floats(1, 1), temperature=1.0, **given) == (0, 0.0)
    logits = random_floats(2, 300)
    assert sample_mirostat(logits, temperature=0.0, **given) == (int(np.argmax(logits)), 0.0)
    _, surprise = sample_mirostat(np.zeros(64, np.float32), temperature=1.0, **given)
    assert surprise == pytest.approx(6.0)  # all are alike, and all are left
    logits[5] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        sample_mirostat(logits, temperature=1.0, **given)
    zipf = (-np.log(np.arange(1, 301)) - 1e-12).astype(np.float32)  # a slope of 1
    token, _ = sample_mirostat(zipf, temperature=1.0, **given)
    assert 0 <= token < 300
