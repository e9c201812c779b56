"""The embedding of a text."""

import numpy as np

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import UsageError
from hotcold.model.weights.embedding import EmbeddingWeights
from hotcold.numba_kernels.decode.norm import add_normed_kernel, norm_kind


def has_embeddings(config: ModelConfig) -> bool:
    """Whether the model's hidden states after the last layer are known outside of its head."""
    return not config.per_layer_size


class StateMean:
    """A prompt's embedding: the mean of its tokens' hidden states after the last layer and norm.

    Tokens are added one after another, so that it has the same bits however they were batched.
    """

    def __init__(self, config: ModelConfig, weights: EmbeddingWeights) -> None:
        """Errors: UsageError for a model whose last layer is finished within its head alone."""
        if not has_embeddings(config):
            raise UsageError(
                f"{config.name} computes no embeddings of texts: its layers have embeddings of "
                "tokens of their own; use another model for it"
            )
        self._scale = np.float32(weights.last_scale)
        self._num_added = 0
        self._sum = np.zeros(config.hidden_size, np.float64)
        self._normed = np.empty(config.hidden_size, np.float32)
        self._kind = norm_kind(config.norm_kind)
        self._weight, self._bias = weights.last_norm_weight, weights.last_norm_bias
        self._epsilon = np.float32(config.norm_eps)

    def add(self, place: int, hidden: np.ndarray) -> None:
        """Add the hidden state (d,) float32 of the token at `place`, unless it was added before.

        All places before it have been added.
        """
        if place != self._num_added:
            return
        if self._scale != 1:
            hidden = hidden * self._scale
        add_normed_kernel(
            self._kind, hidden, self._weight, self._bias, self._epsilon, self._normed, self._sum
        )
        self._num_added += 1

    def mean(self) -> list[float]:
        """d float32 numbers. Errors: ValueError where one is not finite."""
        found = (self._sum / self._num_added).astype(np.float32)
        if not np.isfinite(found).all():
            raise ValueError("the hidden states hold a NaN or an infinite number")
        return [float(number) for number in found]
