"""Which token is drawn, by all filters and without: against plain lists in float64."""

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
# What `sample` has; the others are `sample_filtered`'s.
PLAIN: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 2.0, "top_p": 0.0},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.95, "min_p": 0.3},
    {"temperature": 3.0, "top_p": 0.9, "min_p": 0.001},
    {"temperature": 1.0, "top_k": 5000, "top_p": 0.5},
]
FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.5, "top_n_sigma": 1.0, "top_k": 3},
    {"temperature": 0.7, "typical_p": 0.9},
    {"temperature": 1.0, "typical_p": 0.0},
    {"temperature": 1.3, "typical_p": 0.6, "top_k": 12, "top_p": 0.8},
    {"temperature": 1.6, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.51},
    {"temperature": 1.0, "xtc_probability": 0.3, "xtc_threshold": 0.0},
    {
        "temperature": 1.4, "top_n_sigma": 2.0, "top_k": 30, "typical_p": 0.9, "top_p": 0.9,
        "min_p": 0.02, "xtc_probability": 0.4, "xtc_threshold": 0.06,
    },
]  # fmt: skip
ALL = [*PLAIN, *FILTERS]


def draw(logits: np.ndarray, options: dict[str, Any], uniform: float, chance: float = 0.5) -> int:
    if options in PLAIN:
        return sample(logits, **options, uniform=uniform)
    return sample_filtered(logits, **options, uniform=uniform, chance=chance)


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


@pytest.mark.parametrize("options", ALL, ids=str)
@pytest.mark.parametrize("size", [1, 2, 65, 700])
def test_what_is_drawn_and_how_often(size: int, options: dict[str, Any]) -> None:
    logits = random_floats(size, size) * 2
    if size > 2:
        logits[size // 2 :: 7] = -np.inf
    shares = sample_shares(logits, **options)
    random = np.random.default_rng(2).random((8000, 2)).tolist()
    ids = [draw(logits, options, uniform, chance) for uniform, chance in random]
    assert_drawn_as(np.bincount(ids, minlength=size), shares)
    found = {draw(logits, options, uniform, chance) for uniform in EDGES for chance in EDGES}
    assert found <= set(np.flatnonzero(shares).tolist())


@pytest.mark.parametrize("size", [1, 511, 512, 513, 1500])
@pytest.mark.parametrize("kind", ["few", "negative", "zeros", "infinite", "all -inf"])
def test_greedy_of_many_pieces(size: int, kind: str) -> None:
    """Pieces of 512 logits: equal numbers, among them 0 and -0, stand in several."""
    for seed in range(8):
        logits = random_floats(seed, size)
        if kind == "few":
            logits = np.round(logits)
        elif kind == "negative":
            logits = -np.abs(logits) - np.float32(1e-30)
        elif kind == "zeros":
            logits = np.where(logits > 0, logits * 0, -np.abs(logits) * 0)
        elif kind == "infinite":
            logits[[size // 2, size - 1]] = np.inf
        else:
            logits[:] = -np.inf
        first = int(np.argmax(logits))
        assert sample(logits, temperature=0.0, uniform=0.9) == first
        assert sample(logits, temperature=2.0, top_k=1, uniform=0.9) == first
        assert sample_filtered(logits, temperature=0.0, typical_p=0.1, uniform=0.9) == first


@pytest.mark.parametrize("options", [{"temperature": 0.0}, *ALL], ids=str)
def test_logits_that_are_not_finite(options: dict[str, Any]) -> None:
    """A NaN is refused, the first of infinite ones is drawn, and of impossible ones, too."""
    logits = random_floats(1, 1500)
    logits[77] = np.inf
    for uniform in EDGES:
        assert draw(logits, options, uniform) == 77
    for at, nan in ((0, np.nan), (511, -np.nan), (512, np.nan), (1499, -np.nan)):
        spoilt = logits.copy()
        spoilt[at] = nan
        with pytest.raises(ValueError, match="NaN"):
            draw(spoilt, options, 0.5)
    if options in PLAIN:
        assert draw(np.full(300, -np.inf, np.float32), options, ALMOST_ONE) == 0


def test_the_last_uniform_draws_nothing_beyond_top_p() -> None:
    """However the sums that it is compared with are rounded."""
    rng = np.random.default_rng(2)
    for _ in range(2000):
        logits = rng.normal(0, 3, 600).astype(np.float32)
        order = np.argsort(-logits, kind="stable")
        held = np.cumsum(np.exp(logits[order].astype(np.float64) - logits.max()))
        kept = 1 + int(np.searchsorted(held, 0.99 * held[-1]))
        assert sample(logits, temperature=1.0, top_p=0.99, uniform=ALMOST_ONE) in order[:kept]


@pytest.mark.parametrize(
    "changes",
    [
        {"logits": np.zeros(4, np.float64)},
        {"logits": np.zeros((1, 4), np.float32)},
        {"logits": np.zeros(0, np.float32)},
        *({"temperature": bad} for bad in (-0.1, math.nan)),
        {"top_k": -1},
        *({name: bad} for name in ("top_p", "min_p") for bad in (-0.1, 1.1)),
        *({"uniform": bad} for bad in (1.0, -0.1, math.nan)),
    ],
    ids=str,
)
def test_refused(changes: dict[str, Any]) -> None:
    good: dict[str, Any] = {"logits": np.zeros(4, np.float32), "temperature": 1.0, "uniform": 0.5}
    sample(**good)
    with pytest.raises(ValueError):
        sample(**(good | changes))


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
    logits = random_floats(2, 300)
    assert sample_mirostat(logits, temperature=0.0, **given) == (int(np.argmax(logits)), 0.0)
    _, surprise = sample_mirostat(np.zeros(64, np.float32), temperature=1.0, **given)
    assert surprise == pytest.approx(6.0)  # all are alike, and all are left
    logits[5] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        sample_mirostat(logits, temperature=1.0, **given)
    zipf = (-np.log(np.arange(1, 301)) - 1e-12).astype(np.float32)  # a slope of 1
    assert 0 <= sample_mirostat(zipf, temperature=1.0, **given)[0] < 300
