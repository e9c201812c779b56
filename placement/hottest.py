"""The neurons that fire most often, as many as there is room for: hot ones without a solver."""

from __future__ import annotations

import numpy as np


def hottest_neurons(
    shape: tuple[int, int],
    num_neurons: int,
    frequency: np.ndarray | None = None,
    candidates: np.ndarray | None = None,
) -> list[np.ndarray]:
    """The `num_neurons` most frequent of the candidates: sorted ids of each layer.

    Of equally frequent ones, which are all without `frequency`, layers give as many, from all over
    the layer: neighbours in a checkpoint may fire alike.
    Shapes:  shape (L, N); frequency (L, N) float64; candidates (L, N) bool, all without it
    Dtypes:  ids int32
    """
    scores = np.zeros(shape) if frequency is None else frequency.astype(np.float64)
    if candidates is not None:
        scores = np.where(candidates, scores, -1.0)
    most = scores.size if candidates is None else int(candidates.sum())
    order = np.lexsort((_spread_ranks(shape).ravel(), -scores.ravel()))
    chosen = np.zeros(scores.size, bool)
    chosen[order[: min(num_neurons, most)]] = True
    return [np.flatnonzero(layer).astype(np.int32) for layer in chosen.reshape(shape)]


def _spread_ranks(shape: tuple[int, int]) -> np.ndarray:
    """Ranks (L, N) whose lowest ones are of all layers alike, and far from one another in each."""
    num_layers, num_neurons = shape
    golden = 0.6180339887498949
    places = np.argsort(np.argsort((np.arange(num_neurons) * golden) % 1.0))
    ranks: np.ndarray = places[None, :] * num_layers + np.arange(num_layers)[:, None]
    return ranks
