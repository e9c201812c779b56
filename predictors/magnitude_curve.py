"""What thresholds of one layer leave out and what that costs, counted once for all of them.

A neuron's contribution to the FFN's output has the length c = |fn(gate . x) * up . x| * |down|.
Without some of a token's neurons the output moves by about sqrt(sum of c^2): contributions of
different neurons are nearly at right angles to each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hotcold.model.config.activations import activated, activated_up
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.ffn import FfnWeights, ffn_layers
from hotcold.model.weights.tensor_reader import TensorReader
from hotcold.numba_kernels.load.convert import row_lengths, to_float32

_STEPS_AN_OCTAVE = 16
_OCTAVES = 20  # below the largest magnitude; what is smaller still is left out with the last step
_NUM_STEPS = _STEPS_AN_OCTAVE * _OCTAVES


@dataclass(frozen=True)
class Magnitudes:
    """One layer's neurons for some tokens: |fn(gate . x)|, and the lengths of contributions.

    Shapes:  gates, contributions (T, N)
    Dtypes:  float32
    """

    gates: np.ndarray
    contributions: np.ndarray

    def rows_read(self, gate: float, product: float) -> tuple[np.ndarray, np.ndarray]:
        """For how many tokens each neuron's up row and down row are read: (N,) int64 each."""
        up = self.gates > gate
        return up.sum(axis=0), (up & (self.contributions > product)).sum(axis=0)


def layer_magnitudes(
    checkpoint: Checkpoint, config: ModelConfig, inputs: np.ndarray
) -> Iterator[Magnitudes]:
    """Layer after layer, of recorded FFN inputs (L, T, d), float16 bits.

    Errors:  CheckpointError
    """
    ids = [np.arange(config.ffn_size, dtype=np.int32)] * config.num_layers
    with TensorReader(checkpoint, None) as reader:
        for layer, weights in enumerate(ffn_layers(reader, config, ids)):
            x = torch.from_numpy(inputs[layer].view(np.float16).astype(np.float32))
            yield _magnitudes(config, weights, x)


def _magnitudes(config: ModelConfig, weights: FfnWeights, x: torch.Tensor) -> Magnitudes:
    def products(rows: np.ndarray, bias: np.ndarray) -> torch.Tensor:
        found = x @ torch.from_numpy(to_float32(rows)).T
        return found + torch.from_numpy(bias) if bias.size else found

    name = config.activation_fn
    gates = activated(name, products(weights.gate, weights.gate_bias), config.activation_threshold)
    h = gates * activated_up(name, products(weights.up, weights.up_bias))
    return Magnitudes(gates.abs().numpy(), h.abs().numpy() * row_lengths(weights.down))


@dataclass(frozen=True)
class LayerCurve:
    """Every pair of thresholds (i, j) of a layer: gate_thresholds[i], product_thresholds[j].

    The first of each is 0, and leaves out nothing that is not zero.
    up_shares[i], down_shares[i, j]: of all neurons, those whose row a token reads, on average
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
        """Count the neurons and their c^2 in steps of both magnitudes, then add up from the top."""
        gate_thresholds, gate_steps = _steps(found.gates)
        product_thresholds, product_steps = _steps(found.contributions)
        cells = gate_steps * _NUM_STEPS + product_steps
        shape = _NUM_STEPS, _NUM_STEPS
        squares = found.contributions.ravel().astype(np.float64) ** 2
        counts = np.bincount(cells, minlength=_NUM_STEPS**2).reshape(shape)
        energies = np.bincount(cells, squares, _NUM_STEPS**2).reshape(shape)
        passed, kept = (_from_the_top(cell) for cell in (counts, energies))
        num_tokens = found.gates.shape[0]
        return cls(
            gate_thresholds,
            product_thresholds,
            passed[:, 0] / found.gates.size,
            passed / found.gates.size,
            np.maximum(kept[0, 0] - kept, 0) / num_tokens,
        )


def _steps(magnitudes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Thresholds (S,), and of each number the last one that it exceeds (size,) int64."""
    largest = max(float(magnitudes.max(initial=0)), float(np.finfo(np.float32).tiny))
    exponents = (np.arange(_NUM_STEPS) - _NUM_STEPS) / _STEPS_AN_OCTAVE
    thresholds = np.float32(largest) * np.exp2(exponents).astype(np.float32)
    thresholds[0] = 0
    steps = np.searchsorted(thresholds[1:], magnitudes.ravel())
    return thresholds.astype(np.float64), steps


def _from_the_top(cells: np.ndarray) -> np.ndarray:
    """result[i, j] = sum of cells[i:, j:]."""
    return cells[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1]
