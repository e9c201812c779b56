"""Logits as a request has them changed: by biases, and tokens that came made less likely."""

from collections.abc import Sequence

import numpy as np

from hotcold.model.sampling import SamplingParams


class Penalties:
    """What one request asks of its own last tokens."""

    def __init__(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        self._repeat = np.float32(params.repeat_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._last = params.repeat_last_n
        self._first_counted = 0 if params.penalize_prompt else num_prompt_tokens
        self._repeats = self._last != 0 and self._repeat != 1
        self._counts = self._last != 0 and (self._presence != 0 or self._frequency != 0)
        self._biased = [token_id for token_id, _ in params.biases]
        self._biases = np.array([bias for _, bias in params.biases], np.float32)

    def applied(self, logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """The logits, of the same ones a copy where they change.

        After biases are added, of a token that stands among the last `repeat_last_n` of `tokens`,
        which are the prompt's and then the answer's, c > 0 times among those that count:
            z' = (z / repeat if z > 0 else z * repeat) - c * frequency - presence
        Shapes:  logits, out (V,) float32
        """
        if not (self._biased or self._repeats or self._counts):
            return logits
        found = logits.copy()
        found[self._biased] += self._biases
        first = 0 if self._last < 0 else max(0, len(tokens) - self._last)
        if self._repeats:
            ids = np.unique(np.asarray(tokens[first:], np.int64))
            old = found[ids]
            found[ids] = np.where(old > 0, old / self._repeat, old * self._repeat)
        if self._counts:
            counted = np.asarray(tokens[max(first, self._first_counted) :], np.int64)
            ids, counts = np.unique(counted, return_counts=True)
            less = counts.astype(np.float32) * self._frequency
            found[ids] = found[ids] - less - self._presence
        return found
