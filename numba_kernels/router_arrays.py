"""Routers of all layers of a mixture of experts, as kernels read them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class RouterArrays(NamedTuple):
    """A row for each expert of each layer that has experts, layers one after the other.

    starts (L + 1,) int64: layer l's experts have rows starts[l]:starts[l + 1], none in a dense one
    rows (R, d) float32; bias, selection_bias, expert_scale (R,) or (0,) float32
    input_scale (L, d) or (L, 0) float32: weights of the norm of a router's own input
    shared (L, d) or (L, 0) float32: the shared expert weighs sigmoid(shared[l] . ffn_input)
    """

    starts: np.ndarray
    rows: np.ndarray
    bias: np.ndarray
    selection_bias: np.ndarray
    shared: np.ndarray
    input_scale: np.ndarray
    expert_scale: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(array.nbytes for array in self[1:])


def stacked_routers(layers: Sequence[RouterArrays]) -> RouterArrays:
    """Return the routers of all layers of a model, given those of one after another."""
    counts, arrays = [], list(zip(*layers, strict=True))
    for starts in arrays[0]:
        counts += np.diff(starts).tolist()
    starts = np.append(0, np.cumsum(counts)).astype(np.int64)
    return RouterArrays(starts, *(np.concatenate(of_layers) for of_layers in arrays[1:]))


def no_routers(num_layers: int) -> RouterArrays:
    """Return the routers of a model without experts."""
    nothing = np.empty(0, np.float32)
    return RouterArrays(
        starts=np.zeros(num_layers + 1, np.int64),
        rows=np.empty((0, 0), np.float32),
        bias=nothing,
        selection_bias=nothing,
        shared=np.empty((num_layers, 0), np.float32),
        input_scale=np.empty((num_layers, 0), np.float32),
        expert_scale=nothing,
    )
