"""The interface of predictors: which of a layer's neurons will fire, said beforehand."""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from numba_kernels.predict import select_kernel

PredictorInput = Literal["ffn_input", "residual"]


class LayerPredictor(Protocol):
    """Scores the neurons of one layer, in the order of the services' shards."""

    @property
    def num_neurons(self) -> int:
        """How many it scores."""

    def score(self, x: np.ndarray, scores: np.ndarray) -> None:
        """scores[t, n] > 0 where neuron n is expected to fire for token t.

        Shapes:  x (T, d), scores (T, num_neurons), both float32
        """


class NeuronPredictor:
    """The predictors of all layers, and how the services share out their neurons."""

    def __init__(
        self,
        layers: Sequence[LayerPredictor | None],
        shard_sizes: np.ndarray,
        input_name: PredictorInput,
    ) -> None:
        """layers[l] is None where all neurons of layer l are to be computed.

        shard_sizes[l, s] says how many of layer l's neurons service s holds; the predictors know
        them in that order. `input_name`: the FFN's input, or the residual stream before its norm.
        """
        self.input_name = input_name
        self._layers = list(layers)
        zeros = np.zeros((len(self._layers), 1), np.int64)
        self._bounds = np.concatenate([zeros, np.cumsum(shard_sizes, axis=1)], axis=1)

    def choose(
        self, layer: int, x: np.ndarray, active_ids: np.ndarray, active_tokens: np.ndarray
    ) -> np.ndarray | None:
        """Write each service's candidates; returns their numbers, or None for all neurons.

        Shapes:  x (T, d) float32, T <= 32; active_ids (S, N) int32, active_tokens (S, N) uint32
                 as in numba_kernels.mailbox; result (S,) int64
        """
        predictor, bounds = self._layers[layer], self._bounds[layer]
        if predictor is None:
            return None
        scores = np.empty((x.shape[0], predictor.num_neurons), np.float32)
        predictor.score(x, scores)
        counts = [
            select_kernel(scores, bounds[s], bounds[s + 1], active_ids[s], active_tokens[s])
            for s in range(bounds.shape[0] - 1)
        ]
        return np.array(counts, np.int64)
