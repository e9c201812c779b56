"""One vector for a whole prompt."""

import numpy as np

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.weights.embedding import EmbeddingWeights
from hotcold.numba_kernels.decode.norm import add_normed_kernel, norm_kind


class StateMean:
    """The mean of the hidden states after the last layer and its norm, of all tokens of a prompt.

    Tokens are added one after another, so that it has the same bits however they were batched.
    """

    def __init__(self, config: ModelConfig, weights: EmbeddingWeights) -> None:
        """No token has come yet."""
        self._num_added = 0
        self._sum = np.zeros(config.hidden_size, np.float64)
        self._normed = np.empty(config.hidden_size, np.float32)
        self._kind = norm_kind(config.norm_kind)
        self._weight, self._bias = weights.last_norm_weight, weights.last_norm_bias
        self._epsilon = np.float32(config.norm_eps)

    def add(self, place: int, hidden: np.ndarray) -> None:
        """Take the hidden state (d,) float32 of the token at `place`; one seen again is passed by.

        All places before it have come.
        """
        if place != self._num_added:
            return
        add_normed_kernel(
            self._kind, hidden, self._weight, self._bias, self._epsilon, self._normed, self._sum
        )
        self._num_added += 1

    def mean(self) -> list[float]:
        """Its d numbers, each a float32. Errors: ValueError where one is not finite."""
        found = (self._sum / self._num_added).astype(np.float32)
        if not np.isfinite(found).all():
            raise ValueError("the hidden states hold a NaN or an infinite number")
        numbers: list[float] = found.tolist()
        return numbers
