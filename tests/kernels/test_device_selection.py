"""A device computes what a selection says, and reads nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotcold.cuda_kernels.kernels import CudaKernels
from hotcold.numba_kernels.decode.activations import ALL_FIRE, Thresholds, activation, not_zero
from hotcold.numba_kernels.decode.selection import EVERYTHING, NO_IDS, NO_MASKS, Selection
from tests.kernels.arrays import BITS, random_bits, random_floats
from tests.kernels.device_calls import DeviceCalls
from tests.kernels.emulation.launcher import EmulatedLauncher, aligned
from tests.kernels.quantized_rows import random_rows
from tests.kernels.reference import gemv, widened
from tests.kernels.selections import (
    KINDS,
    factors,
    random_selection,
    selected_ffn,
    starts_of_blocks,
)

pytestmark = pytest.mark.sweep(bits=["f32", "f16"])

NUM_ROWS, WIDTH = 333, 264
TOKENS = [1, 2, 7, 32]
RELU = activation("relu")
Matrices = tuple[np.ndarray, np.ndarray, np.ndarray]  # gate, up, down


def matrices_of(rows: str, width: int = WIDTH) -> Matrices:
    """Random rows of a format."""

    def matrix(seed: int) -> np.ndarray:
        if rows in BITS:
            return random_bits(seed, BITS[rows], NUM_ROWS, width)
        return random_rows(seed, rows, NUM_ROWS, width).rows

    return matrix(1), matrix(2), matrix(3)


def of_token(selection: Selection, t: int) -> Selection:
    """What a step of token t alone would be told."""
    ids, weights = selection.ids, selection.block_weights
    if selection.token_masks.size:
        ids = ids[(selection.token_masks >> np.uint32(t)) & np.uint32(1) != 0]
    return Selection(selection.is_listed, ids, NO_MASKS, weights[t : t + 1])


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("num_blocks", [1, 7])
@pytest.mark.parametrize("name", ["relu", "silu", "drelu"])
def test_random_selections(
    device: DeviceCalls, num_tokens: int, kind: str, bits: str, num_blocks: int, name: str
) -> None:
    rng = np.random.default_rng([num_tokens, num_blocks, KINDS.index(kind)])
    starts = starts_of_blocks(rng, NUM_ROWS, num_blocks)
    selection = random_selection(rng, kind, starts, num_tokens)
    gate, up, down = matrices_of(bits)
    gate_bias, up_bias = random_floats(4, NUM_ROWS), random_floats(5, NUM_ROWS)
    x = random_floats(6, num_tokens, WIDTH) / np.float32(16)
    neurons = device.neurons(gate, up, down, gate_bias, up_bias, starts=starts)
    found, fired = device.selected_ffn(neurons, x, selection, activation(name), not_zero(name))
    arrays = gate, up, down, selection, starts, name, gate_bias, up_bias
    expected = selected_ffn(x, *arrays)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-4 * np.abs(expected).max())
    assert not fired[(factors(selection, starts, num_tokens) == 0).all(axis=0)].any()
    for t in range(num_tokens):
        alone, _ = device.selected_ffn(
            neurons, x[t : t + 1], of_token(selection, t), activation(name), not_zero(name)
        )
        assert (alone[0] == found[t]).all()


class OnlyRows(EmulatedLauncher):
    """Of some matrices, launches may only access the rows given here, by the matrices' address."""

    rows: dict[int, np.ndarray]

    def pointer(self, array: np.ndarray) -> np.uint64:
        at = super().pointer(array)
        if array.ctypes.data in self.rows:
            del self._allowed[array.ctypes.data]
            for row in self.rows[array.ctypes.data]:
                self._allowed[array[row].ctypes.data] = array[row]
        return at


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ["f16", "q8", "q4"])
@pytest.mark.parametrize("width", [256, 96], ids=["whole", "items"])
def test_rows_that_no_token_wants_are_not_read(
    emulated_library: Path, num_tokens: int, kind: str, rows: str, width: int
) -> None:
    wanted, selection, starts = some_rows(num_tokens, kind)
    launcher = OnlyRows(emulated_library)
    launcher.rows = {}
    device = DeviceCalls(CudaKernels(launcher), aligned, np.array)
    neurons = device.neurons(*matrices_of(rows, width), starts=starts)
    assert neurons.up is not None
    for matrix in (neurons.gate, neurons.up, neurons.down):
        launcher.rows[matrix.data.ctypes.data] = np.flatnonzero(wanted)
    x = random_floats(6, num_tokens, width)
    _, fired = device.selected_ffn(neurons, x, selection, RELU, ALL_FIRE)
    assert (fired == wanted).all()
    if not wanted.all():
        with pytest.raises(RuntimeError, match="outside of all arrays"):
            device.selected_ffn(neurons, x, EVERYTHING, RELU, ALL_FIRE)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ["f16", "q8", "q4"])
def test_what_rows_hold_that_no_token_wants_is_nothing_to_it(
    device: DeviceCalls, num_tokens: int, kind: str, rows: str
) -> None:
    """They hold NaN: scales of groups, or all weights."""
    wanted, selection, starts = some_rows(num_tokens, kind)
    matrices = matrices_of(rows, 256)
    poisoned = matrices_of(rows, 256)
    for matrix in poisoned:
        matrix.view(np.uint16)[~wanted] = 0x7E00  # of float16: a NaN
    x, results = random_floats(6, num_tokens, 256), []
    for each in (matrices, poisoned):
        neurons = device.neurons(*each, starts=starts)
        found, _ = device.selected_ffn(neurons, x, selection, RELU, ALL_FIRE)
        results.append(found)
    assert np.isfinite(results[1]).all() and (results[0] == results[1]).all()


def some_rows(num_tokens: int, kind: str) -> tuple[np.ndarray, Selection, np.ndarray]:
    """Whether any token wants each row (N,), by a selection, and the blocks' starts."""
    rng = np.random.default_rng(num_tokens)
    starts = starts_of_blocks(rng, NUM_ROWS, 40)
    selection = random_selection(rng, kind, starts, num_tokens)
    if selection.block_weights.size:
        selection.block_weights[:, ::3] = 0  # for some blocks no token
    wanted = (factors(selection, starts, num_tokens) != 0).any(axis=0)
    assert wanted.any() and wanted.all() == (kind == "all")
    return wanted, selection, starts


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("gated", [True, False], ids=["three", "two"])
def test_weights_come_before_the_product_threshold(
    device: DeviceCalls, num_tokens: int, gated: bool
) -> None:
    """A neuron that passes it without its block's weight may fail it with it."""
    gate, up, down = matrices_of("f32")
    starts = np.array([0, 100, 100, 200, NUM_ROWS])
    weights = random_floats(1, num_tokens, 4)
    x = random_floats(2, num_tokens, WIDTH) / np.float32(16)
    lengths = np.sqrt((widened(down) ** 2).sum(axis=1)).astype(np.float32)
    h = np.maximum(gemv(gate, x), 0)
    passes = h > 0.5
    h = h * (gemv(up, x) if gated else 1) * np.repeat(weights, np.diff(starts), axis=1)
    limit = np.median(np.abs(h * lengths)[passes])
    if gated:
        passes &= np.abs(h * lengths) > limit
    selection = Selection(False, NO_IDS, NO_MASKS, weights)
    neurons = device.neurons(gate, up if gated else None, down, None, None, lengths, starts)
    limits = Thresholds(np.float32(0.5), np.float32(limit))
    found, fired = device.selected_ffn(neurons, x, selection, RELU, limits)
    expected = (h * passes) @ widened(down)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    assert (fired == passes.any(axis=0)).all()


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_weights_of_one_change_no_bit(device: DeviceCalls, num_tokens: int) -> None:
    matrices, x = matrices_of("f16"), random_floats(6, num_tokens, WIDTH)
    ones = Selection(False, NO_IDS, NO_MASKS, np.ones((num_tokens, 5), np.float32))
    ids = np.arange(NUM_ROWS, dtype=np.int32)
    neurons = device.neurons(*matrices, starts=np.array([0, 9, 9, 200, 201, NUM_ROWS]))
    found = [
        device.selected_ffn(neurons, x, selection, RELU, not_zero("relu"))[0]
        for selection in (EVERYTHING, ones, EVERYTHING._replace(is_listed=True, ids=ids))
    ]
    assert (found[0] == found[1]).all() and (found[0] == found[2]).all()


def test_nothing_is_selected(device: DeviceCalls) -> None:
    neurons = device.neurons(*matrices_of("f32"), starts=np.array([0, 50, NUM_ROWS]))
    x = random_floats(1, 3, WIDTH)
    for selection in (
        EVERYTHING._replace(is_listed=True),
        EVERYTHING._replace(block_weights=np.zeros((3, 2), np.float32)),
    ):
        found, fired = device.selected_ffn(neurons, x, selection, RELU, ALL_FIRE)
        assert not found.any() and not fired.any()
