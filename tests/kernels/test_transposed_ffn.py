"""The FFN with transposed down rows: float64, any number of threads, any batch-mates."""

from __future__ import annotations

import numpy as np
import pytest

from hotcold.numba_kernels.decode.activations import ALL_FIRE, Thresholds
from hotcold.numba_kernels.decode.selection import EVERYTHING
from hotcold.numba_kernels.ffn_arrays import TransposedArrays
from hotcold.numba_kernels.load.convert import to_float32
from tests.kernels.arrays import random_floats
from tests.kernels.quantized_rows import random_rows
from tests.kernels.sources import Source, block_rows

pytestmark = pytest.mark.sweep

LAYERS, NEURONS, WIDTH = 2, 512, 256


def arrays_of(has_up: bool, has_bias: bool) -> TransposedArrays:
    """Gates in q4_1; down rows in q4_1 in the first layer and in q6 in the second one."""
    rows = LAYERS * NEURONS

    def quantized(seed: int, kind: str, height: int, width: int) -> np.ndarray:
        return random_rows(seed, kind, height, width).rows

    def biases(*shape: int) -> np.ndarray:
        return random_floats(9, *shape) if has_bias else np.empty((*shape[:-1], 0), np.float32)

    gate = quantized(1, "q4_1", rows, WIDTH)
    return TransposedArrays(
        starts=np.array([[0, NEURONS], [NEURONS, rows]]),
        gate=gate,
        up=quantized(2, "q4_1", rows, WIDTH) if has_up else gate[:0],
        down=block_rows(
            [[quantized(3, "q4_1", WIDTH, NEURONS)], [quantized(4, "q6", WIDTH, NEURONS)]]
        ),
        gate_bias=biases(rows),
        up_bias=biases(rows) if has_up else np.empty(0, np.float32),
        down_bias=biases(LAYERS, 1, WIDTH),
        down_norms=np.linspace(0.5, 1.5, rows, dtype=np.float32),
    )


def computed(
    arrays: TransposedArrays,
    name: str,
    layer: int,
    x: np.ndarray,
    num_threads: int,
    thresholds: Thresholds = ALL_FIRE,
    counts: list[int] | None = None,
) -> np.ndarray:
    """The output computed by `num_threads` threads."""
    source = Source(arrays, arrays.starts, WIDTH)
    out, scratch = source.ffn(layer, x, EVERYTHING, thresholds, name, num_threads)
    if counts is not None:
        counts[:] = [int(scratch.up_counts.sum()), int(scratch.counts.sum())]
    return out


def expected(
    arrays: TransposedArrays,
    layer: int,
    x: np.ndarray,
    thresholds: Thresholds = ALL_FIRE,
    counts: list[int] | None = None,
) -> np.ndarray:
    """silu(gate) * up, down, in float64; a two-matrix FFN without up."""
    part = slice(layer * NEURONS, (layer + 1) * NEURONS)

    def products(rows: np.ndarray, vectors: np.ndarray, bias: np.ndarray) -> np.ndarray:
        found = vectors @ to_float32(rows).astype(np.float64).T
        return found + bias if bias.size else found

    gates = products(arrays.gate[part], x.astype(np.float64), arrays.gate_bias[part])
    h = gates / (1 + np.exp(-gates))
    passed = np.abs(h) > thresholds.gate
    if arrays.up.size:
        h *= products(arrays.up[part], x.astype(np.float64), arrays.up_bias[part])
    kept = passed & (np.abs(h * arrays.down_norms[part]) > thresholds.product)
    if counts is not None:
        counts[:] = [int(passed.any(axis=0).sum()), int(kept.any(axis=0).sum())]
    h *= kept
    return products(arrays.down.matrix(layer), h, arrays.down_bias[layer, 0])


@pytest.mark.parametrize(("has_up", "has_bias"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_all_neurons_in_the_files_formats(layer: int, has_up: bool, has_bias: bool) -> None:
    arrays, x = arrays_of(has_up, has_bias), random_floats(5, 5, WIDTH)
    found, wanted = computed(arrays, "silu", layer, x, 1), expected(arrays, layer, x)
    assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_bits_with_any_batch_mates_by_any_threads(layer: int) -> None:
    arrays, x = arrays_of(True, True), random_floats(6, 8, WIDTH)
    alone = np.concatenate([computed(arrays, "silu", layer, row[None], 1) for row in x])
    for num_tokens in (1, 2, 3, 5, 8):
        for num_threads in (1, 2, 3):
            together = computed(arrays, "silu", layer, x[:num_tokens], num_threads)
            assert together.tobytes() == alone[:num_tokens].tobytes()


SOME = Thresholds(np.float32(0.15), np.float32(0.6))


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_thresholds_leave_out_what_adds_little(layer: int, num_tokens: int) -> None:
    arrays, x = arrays_of(True, True), random_floats(5, num_tokens, WIDTH)
    found_counts, counts = [0, 0], [0, 0]
    found = computed(arrays, "silu", layer, x, 2, SOME, found_counts)
    wanted = expected(arrays, layer, x, SOME, counts)
    assert 0 < counts[1] < counts[0]
    # A number beside a threshold may fall to its other side: x has 8 bits here.
    assert np.abs(np.subtract(found_counts, counts)).max() <= 0.03 * NEURONS
    assert np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()
    assert np.abs(found - expected(arrays, layer, x)).max() > 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_bits_with_thresholds_any_batch_mates_and_any_threads(layer: int) -> None:
    arrays, x = arrays_of(True, True), random_floats(6, 8, WIDTH)
    alone = np.concatenate([computed(arrays, "silu", layer, row[None], 1, SOME) for row in x])
    for num_tokens in (1, 3, 8):
        for num_threads in (1, 3):
            together = computed(arrays, "silu", layer, x[:num_tokens], num_threads, SOME)
            assert together.tobytes() == alone[:num_tokens].tobytes()
