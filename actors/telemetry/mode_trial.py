"""Which of two modes decodes faster here: both run the same tokens in turn, after loading."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np

_TRIED_TOKENS = 16  # each timed again and again, at its own position
_FEWEST_ROUNDS, _SECONDS = 3, 2.0


class Stepping(Protocol):
    """An engine in one mode."""

    mode: str

    def step(
        self, token_ids: Sequence[int], positions: Sequence[int], slots: Sequence[int]
    ) -> np.ndarray:
        """See `actors.driver.engine.Engine.step`."""
        ...


@dataclass(frozen=True)
class ModeTrial:
    """Tokens a second of each mode.

    `path`: the file that keeps them for later starts, "" for none; `is_kept`: it is from there.
    """

    tokens_per_s: dict[str, float]
    path: str = ""
    is_kept: bool = False

    @property
    def fastest(self) -> str:
        """The mode to take."""
        return max(self.tokens_per_s, key=lambda mode: self.tokens_per_s[mode])

    @property
    def line(self) -> str:
        """For people."""
        speeds = [f"{mode} {speed:.1f}" for mode, speed in self.tokens_per_s.items()]
        found = f"mode {self.fastest}: of {' and '.join(speeds)} tokens/s, in turn, the faster"
        if not self.path:
            return found
        when = ", as an earlier start found" if self.is_kept else ", now and at later starts"
        return f"{found}{when}; remove {self.path} to measure again"


def compare_modes(
    predicting: Stepping, other: Stepping, first_id: int, context_length: int
) -> ModeTrial:
    """Time both engines on what `other` generates after `first_id`, as sequence 0.

    A round runs every token in both modes, one right after the other, so that what else the machine
    does slows both alike. Rates are of the medians. What the KV cache held is overwritten.
    Units:   about _SECONDS, and three rounds at least
    Errors:  those of `Engine.step`
    """
    ids = [first_id]
    for position in range(min(_TRIED_TOKENS, context_length - 1)):
        ids.append(int(other.step(ids[position:], [position], [0])[0].argmax()))
    engines = (predicting, other)
    times_s: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + _SECONDS
    num_rounds = 0
    while num_rounds < _FEWEST_ROUNDS or time.perf_counter() < end:
        for position, token_id in enumerate(ids[:-1]):
            for engine, times in zip(engines, times_s, strict=True):
                started = time.perf_counter()
                engine.step([token_id], [position], [0])
                times.append(time.perf_counter() - started)
        num_rounds += 1
    return ModeTrial(
        {
            engine.mode: 1 / max(1e-9, median(times))
            for engine, times in zip(engines, times_s, strict=True)
        }
    )
