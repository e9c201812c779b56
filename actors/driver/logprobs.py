"""Log-probabilities of an answer's and of a prompt's tokens."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from hotcold.actors.protocol.messages import TokenLogprob
from hotcold.model.text.tokenizer import StreamDecoder
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
