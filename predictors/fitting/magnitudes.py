"""Fits thresholds for activations that are never zero: what each layer leaves out, and its cost.

A neuron's contribution to the FFN's output has the length c = |fn(gate . x) * up . x| * |down|.
Without some of a token's neurons the output moves by about sqrt(sum of c^2), as contributions of
different neurons are nearly orthogonal. `LayerCurve` has bytes and error of all thresholds.

A small error of a layer's output adds KL divergence in proportion to its square, and layers add up:
KL = sum over layers of sensitivity[l] * error[l]. At a given price each layer takes the thresholds
of the least bytes + price * KL; `allocate` finds the price at which the sum just keeps within the
budget. TEAL's greedy steps by gain over cost end at the same place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hotcold.model.config.activations import activated, activated_up
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.ffn import FfnWeights, ffn_layers
from hotcold.model.weights.tensor_reader import TensorReader
from hotcold.numba_kernels.decode.activations import Thresholds
from hotcold.numba_kernels.load.convert import row_lengths, to_float32

_STEPS_AN_OCTAVE = 16
_OCTAVES = 20  # below the largest magnitude; smaller ones count to the last step
_NUM_STEPS = _STEPS_AN_OCTAVE * _OCTAVES
_HALVINGS = 50
_PRICES = 1e-9, 1e15  # shares of bytes for a nat


@dataclass(frozen=True)
class Magnitudes:
    """One layer's neurons for some tokens: |fn(gate . x)|, and c.

    With `ids` only those of experts that a token chose, one after another.
    Shapes:  gates, contributions (T, N), or (P,) with ids (P,)
    Dtypes:  float32; ids int64
    """

    gates: np.ndarray
    contributions: np.ndarray
    ids: np.ndarray | None = None
    num_tokens: int = 0  # with ids
    num_neurons: int = 0

    def rows_read(self, gate: float, product: float) -> tuple[np.ndarray, np.ndarray]:
        """Return for how many tokens each neuron's up and down rows are read: (N,) int64 each."""
        up = self.gates > gate
        down = up & (self.contributions > product)
        if self.ids is None:
            return up.sum(axis=0), down.sum(axis=0)
        ups, downs = (
            np.bincount(self.ids[some], minlength=self.num_neurons) for some in (up, down)
        )
        return ups, downs


def layer_magnitudes(
    checkpoint: Checkpoint,
    config: ModelConfig,
    inputs: np.ndarray,
    block_weights: np.ndarray | None = None,
) -> Iterator[Magnitudes]:
    """Yield the magnitudes of each layer for recorded FFN inputs (L, T, d), float16 bits.

    `block_weights` (L, T, B) of a mixture: what each block weighs for these tokens.
    Errors:  CheckpointError
    """
    ids = [np.arange(size, dtype=np.int32) for size in config.ffn_sizes]
    with TensorReader(checkpoint, None) as reader:
        for layer, weights in enumerate(ffn_layers(reader, config, ids)):
            x = torch.from_numpy(inputs[layer].view(np.float16).astype(np.float32))
            if block_weights is None:
                yield _magnitudes(config, weights, x, slice(None))
            else:
                yield _of_chosen(config, layer, weights, x, block_weights[layer])


def _magnitudes(
    config: ModelConfig, weights: FfnWeights, x: torch.Tensor, rows: slice
) -> Magnitudes:
    """Of a layer's neurons in `rows`, with weight 1."""

    def products(matrix: np.ndarray, bias: np.ndarray) -> torch.Tensor:
        found = x @ torch.from_numpy(to_float32(matrix[rows])).T
        return found + torch.from_numpy(bias[rows]) if bias.size else found

    name, limit = config.activation_fn, config.activation_threshold
    gates = activated(name, products(weights.gate, weights.gate_bias), limit)
    h = gates * activated_up(name, products(weights.up, weights.up_bias), limit)
    return Magnitudes(gates.abs().numpy(), h.abs().numpy() * row_lengths(weights.down[rows]))


def _of_chosen(
    config: ModelConfig,
    layer: int,
    weights: FfnWeights,
    x: torch.Tensor,
    block_weights: np.ndarray,
) -> Magnitudes:
    """Of each block the magnitudes for the tokens that chose it. Shapes: block_weights (T, B)."""
    parts, first = [], 0
    for block, size in enumerate(config.layers[layer].ffn.block_sizes):
        own = block_weights[:, block]
        tokens = np.flatnonzero(own)
        found = _magnitudes(config, weights, x[tokens], slice(first, first + size))
        ids = np.broadcast_to(np.arange(first, first + size), found.gates.shape)
        contributions = found.contributions * np.abs(own[tokens, None])
        parts.append((found.gates.ravel(), contributions.ravel(), ids.ravel()))
        first += size
    gates, contributions, ids = map(np.concatenate, zip(*parts, strict=True))
    return Magnitudes(gates, contributions, ids, len(x), first)


@dataclass(frozen=True)
class LayerCurve:
    """Every pair of thresholds (i, j) of a layer: gate_thresholds[i], product_thresholds[j].

    The first thresholds are 0: only zeros are left out.
    up_shares[i], down_shares[i, j]: the share of neurons, of chosen experts, whose row a token
    reads, on average
    errors[i, j]: the mean over tokens of the sum of c^2 of the neurons left out
    Shapes:  thresholds (S,), up_shares (S,), down_shares, errors (S, S)
    Dtypes:  float64
    """

    gate_thresholds: np.ndarray
    product_thresholds: np.ndarray
    up_shares: np.ndarray
    down_shares: np.ndarray
    errors: np.ndarray

    @classmethod
    def of(cls, found: Magnitudes) -> LayerCurve:
        """Histogram neurons and their c^2 over both magnitudes, and sum from the top."""
        gate_thresholds, gate_steps = _steps(found.gates)
        product_thresholds, product_steps = _steps(found.contributions)
        cells = gate_steps * _NUM_STEPS + product_steps
        shape = _NUM_STEPS, _NUM_STEPS
        squares = found.contributions.ravel().astype(np.float64) ** 2
        counts = np.bincount(cells, minlength=_NUM_STEPS**2).reshape(shape)
        energies = np.bincount(cells, squares, _NUM_STEPS**2).reshape(shape)
        passed, kept = (_from_the_top(cell) for cell in (counts, energies))
        num_tokens = found.num_tokens if found.ids is not None else found.gates.shape[0]
        return cls(
            gate_thresholds,
            product_thresholds,
            passed[:, 0] / found.gates.size,
            passed / found.gates.size,
            np.maximum(kept[0, 0] - kept, 0) / num_tokens,
        )


def _steps(magnitudes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Thresholds (S,), and the last one that each magnitude exceeds: (size,) int64."""
    largest = max(float(magnitudes.max(initial=0)), float(np.finfo(np.float32).tiny))
    exponents = (np.arange(_NUM_STEPS) - _NUM_STEPS) / _STEPS_AN_OCTAVE
    thresholds = np.float32(largest) * np.exp2(exponents).astype(np.float32)
    thresholds[0] = 0
    steps = np.searchsorted(thresholds[1:], magnitudes.ravel())
    return thresholds.astype(np.float64), steps


def _from_the_top(cells: np.ndarray) -> np.ndarray:
    """result[i, j] = sum of cells[i:, j:]."""
    return cells[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1]


@dataclass(frozen=True)
class Choice:
    """Thresholds of one layer, with the expected shares of rows read, and error."""

    thresholds: Thresholds
    up_share: float
    down_share: float
    error: float


def choose(curve: LayerCurve, up_weight: float, price: float) -> Choice:
    """Return the pair of the least up_weight * up + (1 - up_weight) * down + price * error.

    `up_weight` is the share of the up row in the bytes of up and down.
    """
    read = up_weight * curve.up_shares[:, None] + (1 - up_weight) * curve.down_shares
    i, j = np.unravel_index(np.argmin(read + price * curve.errors), read.shape)
    return Choice(
        Thresholds(np.float32(curve.gate_thresholds[i]), np.float32(curve.product_thresholds[j])),
        float(curve.up_shares[i]),
        float(curve.down_shares[i, j]),
        float(curve.errors[i, j]),
    )


def allocate(
    curves: Sequence[LayerCurve], sensitivities: Sequence[float], up_weight: float, budget: float
) -> list[Choice]:
    """Return thresholds of all layers that are expected to cost at most `budget` nats of KL."""

    def at(price: float) -> list[Choice]:
        return [
            choose(curve, up_weight, price * sensitivity)
            for curve, sensitivity in zip(curves, sensitivities, strict=True)
        ]

    def cost(choices: list[Choice]) -> float:
        found = zip(choices, sensitivities, strict=True)
        return sum(sensitivity * choice.error for choice, sensitivity in found)

    low, high = np.log(_PRICES)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if cost(at(np.exp(middle))) > budget:
            low = middle
        else:
            high = middle
    return at(np.exp(high))


def alike(curve: LayerCurve, up_weight: float, error_share: float) -> Choice:
    """Return the cheapest thresholds of a layer that leave out at most a share of its c^2."""
    return allocate([curve], [1.0], up_weight, error_share * float(curve.errors.max()))[0]
