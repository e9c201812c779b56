"""The sign predictor: a few bits of gate rows times a few bits of the input; nothing is trained."""

from dataclasses import dataclass

import numpy as np

from hotcold.model.weights.memory import aligned_empty


@dataclass(frozen=True)
class SignLayer:
    """One layer's weight bits and thresholds; the formula is in numba_kernels.decode.predict.

    Shapes:  bits (N, P * ceil(d / 64)) uint64; thresholds (N,), center, scale (d,) float32
    Source:  SparseInfer (arXiv 2411.12692), with three bits of the centred input, one or two of the
             weights, and a threshold for each neuron
    """

    bits: np.ndarray
    thresholds: np.ndarray
    center: np.ndarray
    scale: np.ndarray

    @property
    def num_neurons(self) -> int:
        """Number of neurons."""
        return self.bits.shape[0]

    @property
    def num_weight_planes(self) -> int:
        """Bits of each gate weight: 1 or 2."""
        return self.bits.shape[1] // -(-self.center.size // 64)

    @property
    def num_bytes(self) -> int:
        """Bytes that a token reads."""
        return sum(a.nbytes for a in (self.bits, self.thresholds, self.center, self.scale))

    def arranged(self, neuron_ids: np.ndarray) -> "SignLayer":
        """Return the predictor of the neurons `neuron_ids`, in that order."""
        return SignLayer(
            _copied_rows(self.bits, neuron_ids),
            np.ascontiguousarray(self.thresholds[neuron_ids]),
            self.center,
            self.scale,
        )


def _copied_rows(array: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """array[ids] in huge pages: every token reads all of it."""
    out = aligned_empty((ids.size, *array.shape[1:]), array.dtype)
    return np.take(array, ids, axis=0, out=out)
