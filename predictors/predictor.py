"""The interface of predictors: which of a layer's neurons will fire, before they are computed."""

from collections.abc import Sequence
from typing import Literal, Protocol, Self

import numpy as np

from hotcold.numba_kernels.decode.predict import select_kernel
from hotcold.numba_kernels.serve.mailbox import SharedBuffers
from hotcold.numba_kernels.serve.predict_team import NO_TEAM, PredictTeam
from hotcold.predictors.sign import SignLayer
from hotcold.predictors.sign_team import SignTeam

PredictorInput = Literal["ffn_input", "residual"]


class LayerPredictor(Protocol):
    """Scores the neurons of one layer, in the order of the services' shards."""

    @property
    def num_neurons(self) -> int:
        """Number of neurons."""

    def arranged(self, neuron_ids: np.ndarray) -> Self:
        """Return the predictor of the neurons in the rows `neuron_ids`, in that order."""

    def score(self, x: np.ndarray, scores: np.ndarray) -> None:
        """Write scores[t, n] > 0 where neuron n is expected to fire for token t.

        Shapes:  x (T, d), scores (T, num_neurons), both float32
        """


class NeuronPredictor:
    """The predictors of all layers, for neurons divided among services."""

    def __init__(
        self,
        layers: Sequence[LayerPredictor | None],
        shard_sizes: np.ndarray,
        input_name: PredictorInput,
    ) -> None:
        """layers[l] is None where all neurons of layer l are computed.

        shard_sizes[l, s] is the number of layer l's neurons in service s; the predictors have them
        in that order. `input_name`: the FFN's input, or the residual stream before its norm.
        """
        self.input_name = input_name
        self._layers = list(layers)
        zeros = np.zeros((len(self._layers), 1), np.int64)
        self._bounds = np.concatenate([zeros, np.cumsum(shard_sizes, axis=1)], axis=1)
        self._team: SignTeam | None = None

    def rearranged(
        self, before: Sequence[Sequence[np.ndarray]], shards: Sequence[Sequence[np.ndarray]]
    ) -> "NeuronPredictor":
        """Return the predictors for services s with the neurons shards[s][l], in that order.

        before[s][l]: the same neurons in this predictor's order.
        """
        sizes = np.array([[ids.size for ids in shard] for shard in shards], np.int64).T
        layers: list[LayerPredictor | None] = []
        for i, layer in enumerate(self._layers):
            old, new = (np.concatenate([shard[i] for shard in s]) for s in (before, shards))
            by_id = np.argsort(old)
            rows = by_id[np.searchsorted(old, new, sorter=by_id)]
            layers.append(None if layer is None else layer.arranged(rows))
        return NeuronPredictor(layers, sizes, self.input_name)

    def use_threads(
        self, buffers: SharedBuffers, service: int, num_threads: int, max_tokens: int
    ) -> None:
        """Have threads score as soon as `service` replies; only sign predictors do so.

        `buffers` must be shared with that service. Call `announce` before each request, `close` at
        the end.
        """
        known = [layer for layer in self._layers if isinstance(layer, SignLayer)]
        if not known or len(known) < sum(layer is not None for layer in self._layers):
            return
        layers = [layer if isinstance(layer, SignLayer) else None for layer in self._layers]
        self._team = SignTeam(layers, buffers, service, num_threads, max_tokens, self._bounds)
        self._layers = list(self._team.layers)

    @property
    def team(self) -> PredictTeam:
        """The threads of `use_threads`, for the compiled layer loop."""
        return NO_TEAM if self._team is None else self._team.compiled

    def announce(self, layer: int, num_tokens: int, array_name: str, number: int) -> None:
        """Prepare to score the reply to request `number`; see `SignTeam.announce`."""
        if self._team is not None and self._layers[layer] is not None:
            self._team.announce(layer, num_tokens, array_name, number)

    def close(self) -> None:
        """End the threads of `use_threads`."""
        if self._team is not None:
            self._team.close()

    def choose(
        self,
        layer: int,
        x: np.ndarray,
        active_ids: Sequence[np.ndarray],
        active_masks: Sequence[np.ndarray],
    ) -> np.ndarray | None:
        """Write each service's expected neurons; return their numbers, or None for all neurons.

        Shapes:  x (T, d) float32, T <= 32; of each service active_ids (N,) int32, active_masks
                 (N,) uint32, as in numba_kernels.serve.mailbox; result (S,) int64
        """
        predictor, bounds = self._layers[layer], self._bounds[layer]
        if predictor is None:
            return None
        scores = None if self._team is None else self._team.score(layer, x.shape[0])
        if scores is None:
            scores = np.empty((x.shape[0], predictor.num_neurons), np.float32)
            predictor.score(x, scores)
        counts = [
            select_kernel(scores, bounds[s], bounds[s + 1], active_ids[s], active_masks[s])
            for s in range(bounds.shape[0] - 1)
        ]
        return np.array(counts, np.int64)
