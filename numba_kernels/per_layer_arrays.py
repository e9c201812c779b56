"""Embeddings that layers have of their own, as kernels read them (Gemma 4 E2B, E4B)."""

from typing import NamedTuple

import numpy as np


class PerLayerArrays(NamedTuple):
    """Matrices of layers' own embeddings, each (L, rows, items) in a format of its own.

    context (L, P, d), gate (L, P, d), projection (L, d, P) weights; context_norm (P,) float32.
    P is 0, and so is L, where layers have none. The formula: `model/config/layer_order.py`.
    """

    context: np.ndarray
    context_norm: np.ndarray
    gate: np.ndarray
    projection: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(array.nbytes for array in self)


def no_per_layer() -> PerLayerArrays:
    """The arrays of a model whose layers have none."""
    nothing = np.empty((0, 0, 0), np.float32)
    return PerLayerArrays(nothing, np.empty(0, np.float32), nothing, nothing)
