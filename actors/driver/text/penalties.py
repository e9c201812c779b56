"""Tokens that have come are made less likely to come again, as in llama.cpp and Ollama."""

from collections.abc import Sequence

import numpy as np

from model.sampling import SamplingParams


class Penalties:
    """What one request asks of its own last tokens, those of its prompt too."""

    def __init__(self, params: SamplingParams) -> None:
        self._repeat = np.float32(params.repeat_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._last = params.repeat_last_n
        changes = (self._repeat != 1, self._presence != 0, self._frequency != 0)
        self._changes_nothing = self._last == 0 or not any(changes)

    def applied(self, logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """The logits, of the same ones a copy where they change.

        Of a token that stands c > 0 times among the last `repeat_last_n` of `tokens`:
            z' = (z / repeat if z > 0 else z * repeat) - c * frequency - presence
        Shapes:  logits, out (V,) float32
        """
        if self._changes_nothing:
            return logits
        recent = tokens if self._last < 0 else tokens[-self._last :]
        ids, counts = np.unique(np.asarray(recent, np.int64), return_counts=True)
        found, old = logits.copy(), logits[ids]
        scaled = np.where(old > 0, old / self._repeat, old * self._repeat)
        found[ids] = scaled - counts.astype(np.float32) * self._frequency - self._presence
        return found
