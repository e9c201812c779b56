"""Tokens that have come are made less likely to come again, as in llama.cpp and Ollama."""

from collections.abc import Sequence

import numpy as np

from model.sampling import SamplingParams


class Penalties:
    """What one request asks of its own last tokens."""

    def __init__(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        self._repeat = np.float32(params.repeat_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._last = params.repeat_last_n
        self._first = 0 if params.penalize_prompt else num_prompt_tokens
        changes = (self._repeat != 1, self._presence != 0, self._frequency != 0)
        self._changes_nothing = self._last == 0 or not any(changes)

    def applied(self, logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """The logits, of the same ones a copy where they change.

        Of a token that stands c > 0 times among the last `repeat_last_n` of `tokens`, which are the
        prompt's and then the answer's:
            z' = (z / repeat if z > 0 else z * repeat) - c * frequency - presence
        Shapes:  logits, out (V,) float32
        """
        if self._changes_nothing:
            return logits
        first = self._first if self._last < 0 else max(self._first, len(tokens) - self._last)
        ids, counts = np.unique(np.asarray(tokens[first:], np.int64), return_counts=True)
        found, old = logits.copy(), logits[ids]
        scaled = np.where(old > 0, old / self._repeat, old * self._repeat)
        found[ids] = scaled - counts.astype(np.float32) * self._frequency - self._presence
        return found
