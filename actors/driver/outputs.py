"""What a request hands out besides text: logprobs, an embedding."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from hotcold.actors.protocol.messages import TokenLogprob
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import UsageError
from hotcold.model.text.tokenizer import StreamDecoder
from hotcold.model.weights.embedding import EmbeddingWeights
from hotcold.numba_kernels.decode.norm import add_normed_kernel, norm_kind
from hotcold.numba_kernels.decode.sampling import largest
from hotcold.numba_kernels.decode.scoring import log_sum_exp_kernel


def token_logprob(logits: np.ndarray, token_id: int, num_top: int, at: int = 0) -> TokenLogprob:
    """log softmax(logits)[token_id], and the `num_top` largest of all, largest first.

    `at`: where its text begins in the answer's, in characters.

    Shapes:  logits (V,) float32
    Errors:  ValueError where the logits hold a NaN or the largest is infinite
    """
    log_sum = float(log_sum_exp_kernel(logits)[1])
    if not np.isfinite(log_sum):
        raise ValueError("the logits hold a NaN or an infinite number")
    ids = largest(logits, min(num_top, logits.size)) if num_top else np.empty(0, np.int64)
    values = logits[ids].astype(np.float64) - log_sum
    top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token_id, float(logits[token_id]) - log_sum, top, at)


class AnswerLogprobs:
    """Logprobs of an answer's tokens, handed out with the text that they begin or end in.

    Those of a token that a stop string cuts off altogether are never handed out.
    """

    def __init__(self, num_top: int | None, held: Sequence[TokenLogprob] = ()) -> None:
        """`held`: of the answer's last tokens until now."""
        self._num_top = num_top  # None: no logprobs are wanted
        self._held = deque(held)

    @property
    def held(self) -> tuple[TokenLogprob, ...]:
        """Those that are not handed out yet."""
        return tuple(self._held)

    def add(self, logits: np.ndarray, token_id: int, decoder: StreamDecoder | None) -> None:
        """Add a chosen token, which `decoder` has not seen yet. Errors: ValueError."""
        if self._num_top is not None:
            at = decoder.num_chars if decoder is not None else -1
            self._held.append(token_logprob(logits, token_id, self._num_top, at))

    def take(self, num_shown: int | None) -> tuple[TokenLogprob, ...]:
        """The logprobs of the answer's first `num_shown` characters; None: all."""
        taken = []
        while self._held and (num_shown is None or self._held[0].at < num_shown):
            taken.append(self._held.popleft())
        return tuple(taken)


class PromptLogprobs:
    """Logprobs of a prompt's tokens, each from all tokens before it."""

    def __init__(self, tokens: Sequence[int], num_top: int | None) -> None:
        self._tokens = list(tokens) if num_top is not None else []
        self._num_top = num_top or 0
        self._found = [TokenLogprob(token_id, None) for token_id in self._tokens[:1]]
        self._is_taken = not self._found
        self._problem: ValueError | None = None

    def wants(self, place: int) -> bool:
        """Whether the logits after the token at `place` are still to come."""
        return len(self._found) - 1 <= place < len(self._tokens) - 1

    def add(self, place: int, logits: np.ndarray) -> None:
        """Add the logits (V,) after the token at `place`; if they are bad, `check` raises."""
        next_id = self._tokens[place + 1]
        try:
            self._found.append(token_logprob(logits, next_id, self._num_top))
        except ValueError as problem:
            self._found.append(TokenLogprob(next_id, None))
            self._problem = self._problem or problem

    def check(self) -> None:
        """Raise ValueError if any logits were bad."""
        if self._problem is not None:
            raise self._problem

    def take(self) -> tuple[TokenLogprob, ...]:
        """All of them, once."""
        if self._is_taken:
            return ()
        self._is_taken = True
        return tuple(self._found)


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
