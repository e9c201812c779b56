"""Which token is drawn: which ones may be, and how often each is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hotcold.numba_kernels.decode.sampling import largest, sample, sample_kernel
from tests.kernels.arrays import random_floats, unaligned
from tests.kernels.reference import sample_shares

pytestmark = pytest.mark.sweep

ALMOST_ONE = float(np.nextafter(1.0, 0.0))
EDGES = (0.0, 1e-9, 0.25, 0.5, 0.75, 0.999999, ALMOST_ONE)


@pytest.mark.parametrize("size", [1, 2, 65, 1000])
def test_greedy(cpu_backend: SimpleNamespace, size: int) -> None:
    for seed in range(20):
        logits = random_floats(seed, size)
        for options in ({"temperature": 0.0}, {"temperature": 2.0, "top_k": 1}):
            chosen = cpu_backend.sample(logits, **options, uniform=0.9)
            assert chosen == int(np.argmax(logits))


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_top_p_zero_keeps_the_likeliest(
    cpu_backend: SimpleNamespace, options: dict[str, Any]
) -> None:
    for size in (1, 2, 1000):
        logits = random_floats(size, size)
        for uniform in EDGES:
            chosen = cpu_backend.sample(logits, temperature=2, top_p=0, uniform=uniform, **options)
            assert chosen == int(np.argmax(logits))


def test_whole_numbers_are_not_compiled_for() -> None:
    logits = random_floats(1, 100)
    sample(logits, temperature=1.0, top_p=1.0, min_p=0.0, uniform=0.5)
    compiled = list(sample_kernel.signatures)
    sample(logits, temperature=1, top_p=1, min_p=0, uniform=0)
    assert sample_kernel.signatures == compiled


def test_greedy_takes_the_first_of_equals(cpu_backend: SimpleNamespace) -> None:
    logits = np.array([1, 3, 2, 3, 3], np.float32)
    assert cpu_backend.sample(logits, temperature=0.0, uniform=0.9) == 1
    assert cpu_backend.sample(logits * 0, temperature=0.0, uniform=0.9) == 0


@pytest.mark.parametrize("size", [1, 511, 512, 513, 1500])
@pytest.mark.parametrize("kind", ["few", "negative", "zeros", "infinite", "all -inf"])
def test_greedy_of_many_pieces(cpu_backend: SimpleNamespace, size: int, kind: str) -> None:
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
        chosen = cpu_backend.sample(logits, temperature=0.0, uniform=0.9)
        assert chosen == int(np.argmax(logits))


@pytest.mark.parametrize("nan", [np.nan, -np.nan])
def test_a_nan_in_any_piece_is_refused(cpu_backend: SimpleNamespace, nan: float) -> None:
    for at in (0, 511, 512, 1499):
        logits = random_floats(1, 1500)
        logits[7], logits[at] = np.inf, nan
        with pytest.raises(ValueError, match="NaN"):
            cpu_backend.sample(logits, temperature=0.0, uniform=0.5)


@pytest.mark.parametrize("at", [0, 3, 99])
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5}],
    ids=str,
)
def test_nan_is_refused(cpu_backend: SimpleNamespace, at: int, options: dict[str, Any]) -> None:
    logits = random_floats(1, 100)
    logits[at] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        cpu_backend.sample(logits, **options, uniform=0.5)


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.7},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.95, "min_p": 0.3},
    {"temperature": 3.0, "top_p": 0.9, "min_p": 0.001},
    {"temperature": 1.0, "top_k": 5000, "top_p": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 700, 5000])
def test_only_what_the_filters_keep_and_all_of_it(
    cpu_backend: SimpleNamespace, size: int, options: dict[str, Any]
) -> None:
    logits = random_floats(size, size) * 2
    shares = sample_shares(logits, **options)
    uniforms = [*EDGES, *np.random.default_rng(1).random(200)]
    chosen = {cpu_backend.sample(logits, **options, uniform=float(u)) for u in uniforms}
    assert chosen <= set(np.flatnonzero(shares).tolist())
    likely = np.flatnonzero(shares > 0.05)
    assert chosen >= set(likely.tolist())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_distribution(cpu_backend: SimpleNamespace, options: dict[str, Any]) -> None:
    logits = random_floats(7, 90) * 2
    shares = sample_shares(logits, **options)
    uniforms = np.random.default_rng(2).random(20_000)
    drawn = [cpu_backend.sample(logits, **options, uniform=float(u)) for u in uniforms]
    counts = np.bincount(drawn, minlength=90)
    assert not counts[shares == 0].any()
    expected = shares * uniforms.size
    rare = expected < 8
    bins = np.append(counts[~rare], counts[rare].sum())
    expected_bins = np.append(expected[~rare], expected[rare].sum())
    keep = expected_bins > 0
    if keep.sum() > 1:
        from scipy.stats import chisquare

        assert chisquare(bins[keep], expected_bins[keep]).pvalue > 1e-3


def test_each_share_is_one_run_of_uniforms(cpu_backend: SimpleNamespace) -> None:
    """An even grid of uniforms meets every id as often as its share says, exactly."""
    logits = np.log(np.array([1, 4, 2, 8, 1], np.float64) / 16).astype(np.float32)
    grid = (np.arange(1600) + 0.5) / 1600
    for options in ({}, {"top_k": 5}, {"top_p": 0.9999}):
        drawn = [cpu_backend.sample(logits, temperature=1.0, uniform=u, **options) for u in grid]
        assert np.bincount(drawn).tolist() == [100, 400, 200, 800, 100]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_infinitely_unlikely_tokens_are_never_drawn(
    cpu_backend: SimpleNamespace, options: dict[str, Any]
) -> None:
    logits = np.full(300, -np.inf, np.float32)
    logits[[5, 120, 299]] = [1.0, 2.0, 1.5]
    for uniform in (*EDGES, *np.random.default_rng(3).random(50)):
        assert cpu_backend.sample(logits, **options, uniform=float(uniform)) in (5, 120, 299)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_of_impossible_tokens_the_first_is_drawn(options: dict[str, Any]) -> None:
    logits = np.full(300, -np.inf, np.float32)
    assert sample(logits, **options, uniform=ALMOST_ONE) == 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_infinitely_likely_token_is_drawn(
    cpu_backend: SimpleNamespace, options: dict[str, Any]
) -> None:
    logits = random_floats(1, 300)
    logits[77] = np.inf
    for uniform in EDGES:
        assert cpu_backend.sample(logits, **options, uniform=uniform) == 77


def test_uniform_edges_without_filters(cpu_backend: SimpleNamespace) -> None:
    logits = np.array([-np.inf, 0, 0, -np.inf], np.float32)
    assert cpu_backend.sample(logits, temperature=1.0, uniform=0.0) == 1
    assert cpu_backend.sample(logits, temperature=1.0, uniform=ALMOST_ONE) == 2


def test_the_last_uniform_draws_nothing_beyond_top_p() -> None:
    """However the sums that it is compared with are rounded."""
    rng = np.random.default_rng(2)
    for _ in range(2000):
        logits = rng.normal(0, 3, 600).astype(np.float32)
        order = np.argsort(-logits, kind="stable")
        held = np.cumsum(np.exp(logits[order].astype(np.float64) - logits.max()))
        kept = 1 + int(np.searchsorted(held, 0.99 * held[-1]))
        drawn = sample(logits, temperature=1.0, top_p=0.99, uniform=np.nextafter(1.0, 0.0))
        assert drawn in order[:kept]


def test_top_k_among_equals_keeps_k(cpu_backend: SimpleNamespace) -> None:
    logits = np.zeros(50, np.float32)
    grid = (np.arange(500) + 0.5) / 500
    drawn = [cpu_backend.sample(logits, temperature=1.0, top_k=4, uniform=u) for u in grid]
    counts = np.bincount(drawn)
    assert sorted(counts[counts > 0].tolist()) == [125] * 4


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e4])
def test_extreme_temperatures(cpu_backend: SimpleNamespace, temperature: float) -> None:
    logits = np.array([1, 5, 3, 2], np.float32)
    grid = (np.arange(400) + 0.5) / 400
    drawn = [cpu_backend.sample(logits, temperature=temperature, uniform=u) for u in grid]
    counts = np.bincount(drawn, minlength=4)
    expected = [0, 400, 0, 0] if temperature < 1 else [100] * 4
    assert np.abs(counts - expected).max() <= 1


def test_unaligned_logits(cpu_backend: SimpleNamespace) -> None:
    logits = random_floats(1, 101)
    assert cpu_backend.sample(unaligned(logits), temperature=0.0, uniform=0.0) == int(
        np.argmax(logits)
    )


_GOOD: dict[str, Any] = {
    "logits": np.zeros(4, np.float32),
    "temperature": 1.0,
    "uniform": 0.5,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"logits": np.zeros(4, np.float64)},
        {"logits": np.zeros((1, 4), np.float32)},
        {"logits": np.zeros(0, np.float32)},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": -0.1},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"uniform": 1.0},
        {"uniform": -0.1},
        {"uniform": float("nan")},
    ],
    ids=str,
)
def test_refused(cpu_backend: SimpleNamespace, changes: dict[str, Any]) -> None:
    cpu_backend.sample(**_GOOD)
    with pytest.raises(ValueError):
        cpu_backend.sample(**(_GOOD | changes))


@pytest.mark.parametrize("count", [1, 2, 7, 64, 300])
def test_the_largest_are_in_order_and_of_equals_the_lowest_ids(count: int) -> None:
    logits = np.random.default_rng(3).integers(0, 40, 300).astype(np.float32)
    expected = np.lexsort((np.arange(300), -logits))[:count]
    np.testing.assert_array_equal(largest(logits, count), expected)
