"""The sparse FFN over rows of every format, in memory, transposed and on a GPU, against float64.

Drawn at random: which neurons are selected with which weights, their blocks, numbers and widths,
biases, the function, thresholds. What is not selected and what does not fire holds NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hotcold.numba_kernels.checks import ACTIVATION_CODES
from hotcold.numba_kernels.decode.activations import ALL_FIRE, Thresholds, activation, not_zero
from hotcold.numba_kernels.decode.selection import EVERYTHING, NO_IDS, NO_MASKS, Selection
from tests.kernels import backends, reference
from tests.kernels.arrays import BITS, random_floats
from tests.kernels.neurons import (
    OF_BLOCKS,
    SELECTIONS,
    Matrix,
    Neurons,
    alone,
    factors,
    fired_ids,
    random_selection,
)
from tests.kernels.quantized_rows import IN_LAYERS, KINDS, quantized_vectors

NAMES = list(ACTIVATION_CODES)
LIMITS = {"fatrelu": 0.5, "clamped_silu": 1.0}
SOURCES = [
    *(f"rows {kind}" for kind in (*BITS, *KINDS)),
    *(f"transposed {kind}" for kind in (*BITS, *dict.fromkeys((*IN_LAYERS, *[*KINDS][::2])))),
    *(f"{device} {kind}" for device in backends.DEVICES for kind in (*BITS, *IN_LAYERS)),
    "transposed q4_k+q8+q6",
]
# Kernels are compiled for each of a format and a layout: the default run has once each format that
# differs from others in more than the products of rows.
IN_SWEEPS = [
    *(f"rows {kind}" for kind in ("bf16", "q8", "q4_1", "q5")),
    *(f"transposed {kind}" for kind in ("f32", "f16", "q4", "q6", "mxfp4")),
    *(one for one in SOURCES if one.split()[1] in {*KINDS} - {*IN_LAYERS}),
]
# Computes the output, and whether each neuron fires: by so many threads.
Ffn = Callable[[np.ndarray, Selection, str, Thresholds, int], tuple[np.ndarray, np.ndarray]]


def ffn_of(way: str, neurons: Neurons, request: pytest.FixtureRequest) -> Ffn:
    if way in ("rows", "transposed"):
        source = neurons.stacked()

        def by_numba(
            x: np.ndarray, selection: Selection, name: str, thresholds: Thresholds, threads: int
        ) -> tuple[np.ndarray, np.ndarray]:
            limit = LIMITS.get(name, 0.0)
            out, scratch = source.ffn(1, x, selection, thresholds, name, threads, limit=limit)
            fired = np.zeros(len(neurons.gate.rows), bool)
            fired[fired_ids(scratch)] = True
            return out, fired

        return by_numba
    calls = backends.calls(way, request)
    assert isinstance(neurons.down, Matrix)
    on_device = calls.neurons(
        neurons.gate.rows, neurons.up and neurons.up.rows, neurons.down.rows, neurons.gate_bias,
        neurons.up_bias, neurons.down_norms, neurons.starts,
    )  # fmt: skip

    def by_device(
        x: np.ndarray, selection: Selection, name: str, thresholds: Thresholds, threads: int
    ) -> tuple[np.ndarray, np.ndarray]:
        function = activation(name, LIMITS.get(name, 0.0))
        return calls.selected_ffn(on_device, x, selection, function, thresholds)

    return by_device


def drawn_thresholds(
    rng: np.random.Generator, neurons: Neurons, x: np.ndarray, selection: Selection, name: str
) -> Thresholds:
    """All fire; those that are not zero; or about half of gates, and of those half of products."""
    kind = rng.integers(3)
    if kind < 2:
        return (ALL_FIRE, not_zero(name))[kind]
    h, *_ = neurons.selected(x, selection, name, LIMITS.get(name, 0.0), ALL_FIRE)
    gates = x @ neurons.gate.weights.T
    gate = np.median(np.abs(reference.activate(gates, name, LIMITS.get(name, 0.0))))
    products = np.abs(h * neurons.down_norms)
    product = np.median(products[products > 0]) if products.any() else 0
    return Thresholds(np.float32(gate), np.float32(product if neurons.up else -1))


@pytest.mark.parametrize(
    "source",
    [pytest.param(one, marks=[pytest.mark.thorough] * (one in IN_SWEEPS)) for one in SOURCES],
)
def test_random_layers(source: str, request: pytest.FixtureRequest) -> None:
    """A token has the bits of its own request, of any threads where rows are transposed."""
    way, kind = source.split()
    rng = np.random.default_rng(SOURCES.index(source))
    is_emulated, is_transposed = way == "emulated", way == "transposed"
    for turn in range(4 if is_emulated else 10):
        neurons = Neurons.random(rng, kind, is_transposed, 120 if is_emulated else 400)
        kinds = SELECTIONS if way in ("rows", "transposed") else OF_BLOCKS
        selected = kinds[(turn + SOURCES.index(source)) % len(kinds)]
        name, num_tokens = NAMES[rng.integers(len(NAMES))], int(rng.choice([1, 2, 7, 32]))
        if way not in ("rows", "transposed"):
            neurons.down_biases = neurons.down_biases[:, :0]
        selection = random_selection(rng, selected, neurons.starts, num_tokens)
        x = random_floats(turn, num_tokens, neurons.width) / np.float32(4)
        wide = x.astype(np.float64) if kind in BITS else quantized_vectors(x)
        thresholds = drawn_thresholds(rng, neurons, wide, selection, name)

        # Numbers next to a threshold may fall to either side.
        h, least, most = (
            neurons.selected(
                wide, selection, name, LIMITS.get(name, 0.0),
                Thresholds(*(np.float32(t * part + more) for t in thresholds)),
            )
            for part, more in ((1, 0), (1.001, 1e-5), (0.999, -1e-5))
        )  # fmt: skip
        expected = h[0] @ neurons.down_weights + neurons.biases(selection, num_tokens)
        limits = 4e-6 * neurons.limits(wide, selection, name) + 1e-5
        limits += (np.abs(most[0]) * ~least[2]) @ np.abs(neurons.down_weights)
        if is_transposed and kind not in BITS:  # h is rounded to 8 bits
            limits = limits + 0.03 * np.abs(expected).max()

        unread = ~(factors(selection, neurons.starts, num_tokens) != 0).any(axis=0)
        some = neurons
        if not is_transposed:
            gateless, silent = (np.logical_not(each.any(axis=0)) for each in most[1:])
            some = neurons.poison(unread, gateless, silent)
        ffn = ffn_of(way, some, request)
        found, fired = ffn(x, selection, name, thresholds, 3)
        assert (np.abs(found - expected) <= limits).all(), (turn, name, selected)
        assert (fired >= least[2].any(axis=0)).all()
        assert thresholds == ALL_FIRE or (fired <= most[2].any(axis=0)).all()
        for t in rng.permutation(num_tokens)[: 2 if is_emulated else 6]:
            threads = int(rng.integers(1, 6)) if is_transposed else 3
            own, _ = ffn(x[t : t + 1], alone(selection, int(t)), name, thresholds, threads)
            assert own[0].tobytes() == found[t].tobytes(), (turn, name, selected)


def plain(gate: np.ndarray, down: np.ndarray, up: np.ndarray | None = None) -> Neurons:
    """Neurons of float32 rows without biases."""
    none, starts = np.empty(0, np.float32), np.array([0, len(gate)])
    matrices = [each if each is None else Matrix(each, each, each) for each in (gate, up, down)]
    gates, ups, downs = matrices
    assert gates is not None and downs is not None
    return Neurons(starts, gates, ups, downs, none, none, np.empty((1, 0), np.float32))


@pytest.mark.parametrize("way", ["rows", *backends.DEVICES])
def test_functions_far_from_zero(way: str, request: pytest.FixtureRequest) -> None:
    values = [-1e4, -200, -90, -20, -5, -1e-3, 0, 1e-3, 5, 20, 200, 1e4]
    one = np.ones((len(values), 1), np.float32)
    neurons = plain(np.array(values, np.float32)[:, None], one)
    neurons.starts = np.arange(len(values) + 1)  # a block each
    neurons.down_biases = np.empty((len(values), 0), np.float32)
    ffn, each = ffn_of(way, neurons, request), np.eye(len(values), dtype=np.float32)
    for name in NAMES:
        chosen = EVERYTHING._replace(block_weights=each)
        found, _ = ffn(one, chosen, name, ALL_FIRE, 1)
        wanted = reference.activate(np.array(values), name, LIMITS.get(name, 0.0))
        np.testing.assert_allclose(found[:, 0], wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("way", ["rows", *backends.DEVICES])
def test_a_nan_is_not_swallowed(way: str, request: pytest.FixtureRequest) -> None:
    """Of the input or of a weight: it passes every threshold."""
    gate, up, down, x = (random_floats(seed, 9, 33) for seed in range(4))
    high = Thresholds(np.float32(1e9), np.float32(1e9))
    for spoilt, thresholds in ((x, high), (gate, high), (up, high._replace(gate=np.float32(0)))):
        kept, spoilt[0, 3] = spoilt[0, 3], np.nan
        for num_tokens in (1, 2):
            ffn = ffn_of(way, plain(gate, down, up), request)
            out, fired = ffn(x[:num_tokens], EVERYTHING, "silu", thresholds, 1)
            assert np.isnan(out[0]).all()
            assert fired.sum() == (9 if spoilt is x else 1)
        spoilt[0, 3] = kept


def test_experts_that_no_token_chose_are_not_read() -> None:
    """Nor their transposed down rows."""
    rng = np.random.default_rng(1)
    neurons = Neurons.random(rng, "q4_1", True)
    while len(neurons.starts) != 9 or np.diff(neurons.starts).argmax() == 0:
        neurons = Neurons.random(rng, "q4_1", True)
    source, block = neurons.stacked(), int(np.diff(neurons.starts).argmax())
    weights = rng.uniform(0.2, 1, (5, 8)).astype(np.float32)
    weights[:, block] = 0
    x, chosen = random_floats(6, 5, neurons.width), Selection(False, NO_IDS, NO_MASKS, weights)
    wanted, _ = source.ffn(1, x, chosen, ALL_FIRE, "silu", 2)
    source.rows.down.matrix(1, block).view(np.uint8)[:] = 0xFF  # scales that are NaN
    found, _ = source.ffn(1, x, chosen, ALL_FIRE, "silu", 2)
    np.testing.assert_array_equal(found, wanted)
    weights[1, block] = 0.5
    found, _ = source.ffn(1, x, chosen, ALL_FIRE, "silu", 2)
    assert np.isnan(found[1]).all() and np.array_equal(found[2:], wanted[2:])
