"""The low-rank predictor: two linear layers without bias, ReLU between, as PowerInfer's."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LowRankLayer:
    """One layer's predictor: neuron n is expected to fire where

    sum over j of scales[j] * relu(down[j] . x) * up[j, n] > thresholds[n]
    Shapes:  down (r, d), scales (r,), up (r, N), thresholds (N,)
    Dtypes:  down and up uint16 (float16 bits) or int8; a column of int8 has no scale, and its
             threshold is in the column's units; scales and thresholds float32
    Source:  PowerInfer section 5.1
    """

    down: np.ndarray
    scales: np.ndarray
    up: np.ndarray
    thresholds: np.ndarray

    @property
    def num_neurons(self) -> int:
        """Number of neurons."""
        return self.up.shape[1]

    @property
    def hidden_size(self) -> int:
        """Width between the two layers."""
        return self.down.shape[0]

    @property
    def num_bytes(self) -> int:
        """Most bytes that a token reads."""
        return sum(a.nbytes for a in (self.down, self.scales, self.up, self.thresholds))

    def arranged(self, neuron_ids: np.ndarray) -> "LowRankLayer":
        """Return the predictor of the neurons `neuron_ids`, in that order."""
        return LowRankLayer(
            self.down,
            self.scales,
            np.ascontiguousarray(self.up[:, neuron_ids]),
            np.ascontiguousarray(self.thresholds[neuron_ids]),
        )
