"""The FFN of prefill, of dense layers and of mixtures, in float64; a token's bits are as alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hotcold.actors.cpu.matmul import ffn_scratch, predictor_scratch
from hotcold.model.config.activations import SPARSE_ACTIVATION_FNS
from hotcold.numba_kernels.checks import ACTIVATION_CODES
from hotcold.numba_kernels.decode.activations import activation, not_zero
from hotcold.numba_kernels.decode.selection import EVERYTHING, NO_WEIGHTS
from hotcold.numba_kernels.ffn.prompt_ffn import multiplies_ups, prompt_gates, prompt_sums
from hotcold.numba_kernels.ffn_arrays import (
    ExpertPredictors,
    starts_of,
)
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL
from hotcold.numba_kernels.loops.mailbox import CELLS_A_SERVICE
from tests.kernels.arrays import BITS, random_floats
from tests.kernels.neurons import Matrix, Neurons, Source, block_rows, factors
from tests.kernels.quantized_rows import KINDS, SUMMED

pytestmark = pytest.mark.sweep
NO_COUNTS = np.empty(0, np.int64)
LIMITS = {"fatrelu": 0.5, "clamped_silu": 1.0}
SOURCES = [
    *(f"rows {kind}" for kind in (*BITS, *SUMMED)),
    *(f"transposed {kind}" for kind in (*KINDS, "q8+q4")),
]
# Kernels are compiled for each. What formats differ in is the rows' own, and tested there.
IN_DEFAULT = ["rows f32", "rows bf16", "rows q8", "transposed q4_k", "transposed q8+q4"]
# Experts, one of them not in the shard, and a shared one; ranks of their predictors, if they have.
SIZES, RANKS = np.array([[256, 256, 0, 256, 768]]), np.array([[128, 256, 0, 384, 0]])


def output(
    source: Source,
    name: str,
    x: np.ndarray,
    weights: np.ndarray,
    *,
    skips: bool = True,
    counts: np.ndarray = NO_COUNTS,
    of_model: ExpertPredictors | None = None,
    await_up_down: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """Of the last layer, by two threads."""
    out = np.full((len(x), source.width), np.nan, np.float32)
    function = activation(name, LIMITS.get(name, 0.0))
    arrays, layer, waits = source.rows, len(source.starts) - 1, skips or counts.size > 0
    cells = np.zeros(CELLS_A_SERVICE * INTS_A_CELL, np.int32)
    scratch = ffn_scratch(arrays, 2, len(x), source.width)
    predictors = predictor_scratch(of_model, arrays.starts, 2, len(x), source.width)
    firsts = arrays.starts[layer, :-1]
    more = np.empty((0, *out.shape), np.float32)

    def gates(thread: int) -> None:
        prompt_gates(
            thread, 2, cells, 0, x, arrays, layer, firsts, weights, waits, predictors, scratch,
            function,
        )  # fmt: skip

    def sums(thread: int) -> None:
        prompt_sums(
            thread, 2, cells, 0, x, arrays, layer, weights, skips, counts, scratch, function, out,
            more,
        )  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        if multiplies_ups.py_func(function, waits):
            await_up_down()
        list(pool.map(gates, range(2)))
        await_up_down()
        list(pool.map(sums, range(2)))
    return out


def routed(rng: np.random.Generator, num_tokens: int, num_blocks: int) -> np.ndarray:
    """Weights of two random blocks, which some tokens have all and a few none, or of all blocks."""
    if num_blocks == 1:
        return NO_WEIGHTS
    weights = rng.uniform(0.2, 1, (num_tokens, num_blocks)).astype(np.float32)
    weights *= rng.random(weights.shape).argsort(axis=1) < 2
    weights[rng.random(num_tokens) < 0.05] = 0
    return weights


@pytest.mark.sweep(source=IN_DEFAULT)
@pytest.mark.parametrize("source", SOURCES)
def test_random_layers(source: str) -> None:
    """Right in float64; a token has the same bits whatever others there are.

    Hardly any neuron fires, most do, or few for some tokens: neurons go one by one or as matmuls.
    What no token chose is not read.
    """
    way, kind = source.split()
    rng = np.random.default_rng(SOURCES.index(source))
    for turn in range(8):
        neurons = Neurons.random(rng, kind, way == "transposed")
        number, num_blocks = len(neurons.gate.rows), len(neurons.starts) - 1
        name, num_tokens = list(ACTIVATION_CODES)[turn], int(rng.choice([40, 90, 300]))
        x = random_floats(turn, num_tokens, neurons.width) / np.float32(4)
        spread = np.sqrt(((x[:9] @ neurons.gate.weights.T) ** 2).mean())
        neurons.gate_bias = rng.standard_normal(number).astype(np.float32) * np.float32(0.1)
        neurons.gate_bias -= np.float32(rng.choice([0, 1, 2]) * spread)
        weights = routed(rng, num_tokens, num_blocks)
        selection = EVERYTHING._replace(block_weights=weights)
        limit, wide = LIMITS.get(name, 0.0), x.astype(np.float64)
        h, _, fires = neurons.selected(wide, selection, name, limit, not_zero(name))
        exact = h @ neurons.down_weights + neurons.biases(selection, num_tokens)
        if way == "rows":
            unread = ~(factors(selection, neurons.starts, num_tokens) != 0).any(axis=0)
            neurons = neurons.poison(unread, unread, unread)
        own, counts = neurons.stacked(), np.zeros(number, np.int64)
        together = output(own, name, x, weights, counts=counts)
        scale = np.abs(neurons.limits(wide, selection, name))
        rounding = 4e-6 if kind == "f32" else 0.01
        assert (np.abs(together - exact) <= rounding * scale + 1e-5).all(), (turn, name)
        if name in SPARSE_ACTIVATION_FNS and kind == "f32":
            assert np.abs(counts - fires.sum(axis=0)).sum() <= 2 + fires.sum() // 1000
        if way == "transposed":  # nothing is left out, so up products are of all, before or after
            found = output(own, name, x, weights, skips=False)
            assert found.tobytes() == together.tobytes(), (turn, name)
        ids = np.arange(num_tokens)
        for company in (ids[:1], ids[-1:], ids[[3, 5]], ids[::7], ids[::3], ids[::-1]):
            some = weights[company] if weights.size else weights
            found = output(own, name, x[company], some)
            assert found.tobytes() == together[company].tobytes(), (turn, name)


@pytest.mark.parametrize("kind", ["f32", "q8"])
def test_predictors_say_which_neurons_count(kind: str) -> None:
    rng, starts = np.random.default_rng(1), np.concatenate([[0], np.cumsum(SIZES)])
    gate, up, down = (Matrix.random(seed, kind, int(starts[-1]), 256) for seed in range(3))
    none = np.empty(0, np.float32)
    neurons = Neurons(starts, gate, up, down, none, none, np.empty((5, 0), np.float32))
    outer = [
        Matrix.random(20 + block, kind, int(size), int(rank))
        if rank
        else Matrix.random(9, kind, 1, 32)
        for block, (size, rank) in enumerate(zip(SIZES[0], RANKS[0], strict=True))
    ]
    inner = Matrix.random(19, kind, int(RANKS.sum()), 256)
    rows = [
        each.rows if rank else each.rows[:0] for each, rank in zip(outer, RANKS[0], strict=True)
    ]
    ends = starts_of(RANKS)
    predictors = ExpertPredictors(inner.rows, ends, block_rows([rows]))
    x, weights = random_floats(7, 300, 256), routed(rng, 300, 5)
    arrays = neurons.stacked().rows
    arrays = arrays._replace(starts=arrays.starts[1:], down_bias=arrays.down_bias[1:])
    source = Source(arrays, arrays.starts, 256)
    together = output(source, "drelu", x, weights, of_model=predictors)
    wide, selection = x.astype(np.float64), EVERYTHING._replace(block_weights=weights)
    h, *_ = neurons.selected(wide, selection, "drelu", 0.0, not_zero("drelu"))
    everything = h @ neurons.down_weights
    for block in np.flatnonzero(RANKS[0]):
        hidden = np.maximum(wide @ inner.weights[ends[0, block] : ends[0, block + 1]].T, 0)
        h[:, starts[block] : starts[block + 1]] *= hidden @ outer[block].weights.T > 0
    exact = h @ neurons.down_weights
    error = np.abs(together - exact).max(axis=1)
    # The sign of a sum about zero may be another, of few tokens' neurons.
    assert np.median(error) < (1e-6 if kind == "f32" else 0.03) * np.abs(exact).max()
    assert np.median(np.abs(together - everything).max(axis=1)) > 0.1 * np.abs(exact).max()
    for company in ([0], [299], [3, 5], np.arange(40, 200)):
        found = output(source, "drelu", x[company], weights[company], of_model=predictors)
        assert found.tobytes() == together[company].tobytes()


@pytest.mark.parametrize(("name", "skips"), [("relu", True), ("relu", False), ("drelu", True)])
def test_up_and_down_rows_are_read_once_they_are_loaded(name: str, skips: bool) -> None:
    neurons = Neurons.random(np.random.default_rng(3), "f32", False)
    neurons.up = Matrix.random(5, "f32", *neurons.gate.weights.shape)
    neurons.up_bias = np.empty(0, np.float32)
    source, x = neurons.stacked(), random_floats(2, 40, neurons.width)
    rows = source.rows
    late = np.full_like(rows.up, np.nan), np.full_like(rows.down, np.nan)
    without = Source(rows._replace(up=late[0], down=late[1]), source.starts, source.width)

    def await_up_down() -> None:
        late[0][:], late[1][:] = rows.up, rows.down

    expected = output(source, name, x, NO_WEIGHTS, skips=skips)
    assert np.abs(expected).max() > 1
    found = output(without, name, x, NO_WEIGHTS, skips=skips, await_up_down=await_up_down)
    np.testing.assert_array_equal(found, expected)
