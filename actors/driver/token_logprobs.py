"""How likely the model found tokens: those that it chose, and those of its prompt."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from hotcold.actors.protocol.messages import TokenLogprob
from hotcold.model.text.tokenizer import StreamDecoder
from hotcold.numba_kernels.decode.sampling import largest
from hotcold.numba_kernels.decode.scoring import log_sum_exp_kernel


def token_logprob(logits: np.ndarray, token_id: int, num_top: int) -> TokenLogprob:
    """log softmax(logits)[token_id], and the `num_top` largest of all, largest first.

    Shapes:  logits (V,) float32
    Errors:  ValueError where the logits hold a NaN or the largest is infinite
    """
    log_sum = float(log_sum_exp_kernel(logits)[1])
    if not np.isfinite(log_sum):
        raise ValueError("the logits hold a NaN or an infinite number")
    ids = largest(logits, min(num_top, logits.size)).tolist() if num_top else []
    top = tuple((top_id, float(logits[top_id]) - log_sum) for top_id in ids)
    return TokenLogprob(token_id, float(logits[token_id]) - log_sum, top)


class AnswerLogprobs:
    """Logprobs of the tokens of an answer, handed out with the text that they begin or end in.

    A token that a stop string cuts off altogether is never handed out.
    """

    def __init__(self, num_top: int | None) -> None:
        """`num_top` None: none are wanted."""
        self._num_top = num_top
        self._held: deque[tuple[int, TokenLogprob]] = deque()  # each with where its text begins

    def add(self, logits: np.ndarray, token_id: int, decoder: StreamDecoder | None) -> None:
        """Take a token that was chosen; `decoder` has not seen it yet. Errors: ValueError."""
        if self._num_top is not None:
            begin = len(decoder.text) if decoder is not None else -1
            self._held.append((begin, token_logprob(logits, token_id, self._num_top)))

    def take(self, num_shown: int | None) -> tuple[TokenLogprob, ...]:
        """What belongs to the answer's first `num_shown` characters, or all where it is None."""
        taken = []
        while self._held and (num_shown is None or self._held[0][0] < num_shown):
            taken.append(self._held.popleft()[1])
        return tuple(taken)


class PromptLogprobs:
    """Logprobs of a prompt's tokens, each from all tokens before it."""

    def __init__(self, tokens: Sequence[int], num_top: int | None) -> None:
        """`num_top` None: none are wanted."""
        self._tokens = list(tokens) if num_top is not None else []
        self._num_top = num_top or 0
        self._found = [TokenLogprob(token_id, None) for token_id in self._tokens[:1]]
        self._is_taken = not self._found
        self._problem: ValueError | None = None

    def wants(self, place: int) -> bool:
        """Whether the logits after the token at `place` are still to come."""
        return len(self._found) - 1 <= place < len(self._tokens) - 1

    def add(self, place: int, logits: np.ndarray) -> None:
        """Take the logits (V,) after the token at `place`; what is wrong with them `check` says."""
        next_id = self._tokens[place + 1]
        try:
            self._found.append(token_logprob(logits, next_id, self._num_top))
        except ValueError as problem:
            self._found.append(TokenLogprob(next_id, None))
            self._problem = self._problem or problem

    def check(self) -> None:
        """Raise what was wrong with logits, if anything was. Errors: ValueError."""
        if self._problem is not None:
            raise self._problem

    def take(self) -> tuple[TokenLogprob, ...]:
        """All of them, once."""
        if self._is_taken:
            return ()
        self._is_taken = True
        return tuple(self._found)
