"""Modes of steps: which neurons one computes, and which of two modes decodes faster here.

Both run the same tokens in turn, after loading. The result is saved on disk: otherwise two modes
that are about as fast would be chosen by chance at each start, and with them the tokens.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from hotcold.actors.protocol.messages import THRESHOLD
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.atomic_write import write_if_absent
from hotcold.numba_kernels.decode.activations import ALL_FIRE, Thresholds, not_zero
from hotcold.numba_kernels.loops.mailbox import TARGET, threshold_words
from hotcold.numba_kernels.loops.selector import Selector, all_neurons
from hotcold.numba_kernels.own_cache import own_folder
from hotcold.predictors.predictor import NeuronPredictor

if TYPE_CHECKING:
    from hotcold.actors.driver.engine import Engine

_TRIED_TOKENS = 16  # each timed again and again, at its own position, all in one step's pages
_FEWEST_ROUNDS, _SECONDS = 3, 2.0


@dataclass(frozen=True, eq=False)
class StepMode:
    """What `--mode` says, for one step: steps of one engine may differ in it.

    Up and down are computed of neurons that fire: those that pass their layer's `thresholds`;
    services then have the lengths of down rows. With a `predictor`, steps of few tokens request the
    neurons that it chooses, longer ones all: few stay silent throughout.
    """

    name: str
    thresholds: Sequence[Thresholds]
    predictor: NeuronPredictor | None = None
    weights: int = TARGET  # or DRAFT: services compute with what they have for it

    def selector(self, is_routed: np.ndarray) -> Selector:
        """What the layer loop asks; is_routed (L,) bool: which layers have a router."""
        if self.predictor is None:
            return all_neurons(self._threshold_words, is_routed)
        return self.predictor.selector(self._threshold_words, is_routed)

    @cached_property
    def _threshold_words(self) -> np.ndarray:
        return threshold_words(self.thresholds)


def step_mode(config: ModelConfig, name: str, predictor: NeuronPredictor | None = None) -> StepMode:
    """A mode without thresholds of its own: "dense" computes all neurons.

    In others those fire whose activation is not zero.
    Errors:  ValueError for threshold mode
    """
    if name == THRESHOLD:
        raise ValueError(f"the mode {name} needs thresholds")
    alike = ALL_FIRE if name == "dense" else not_zero(config.activation_fn)
    return StepMode(name, [alike] * config.num_layers, predictor)


@dataclass(frozen=True)
class ModeTrial:
    """Tokens a second of each mode.

    path: the file that keeps them for later starts, "" for none; is_saved: they are from there
    """

    tokens_per_s: dict[str, float]
    path: str = ""
    is_saved: bool = False

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
        when = ", as an earlier start found" if self.is_saved else ", now and at later starts"
        return f"{found}{when}; remove {self.path} to measure again"


def compare_modes(
    engine: Engine, modes: Sequence[StepMode], first_id: int, context_length: int
) -> ModeTrial:
    """Time steps of these modes on what the last one generates after `first_id`, as sequence 0.

    A round runs every token in all modes, one right after the other, so that other work of the
    machine slows all alike. Rates are of the medians. The KV cache is overwritten.
    Units:   about _SECONDS, and three rounds at least
    Errors:  those of `Engine.step`
    """
    ids = [first_id]
    for position in range(min(_TRIED_TOKENS, context_length - 1)):
        ids.append(int(engine.step(ids[position:], [position], [0], mode=modes[-1])[0].argmax()))
    times_s: dict[str, list[float]] = {mode.name: [] for mode in modes}
    end = time.perf_counter() + _SECONDS
    num_rounds = 0
    while num_rounds < _FEWEST_ROUNDS or time.perf_counter() < end:
        for position, token_id in enumerate(ids[:-1]):
            for mode in modes:
                started = time.perf_counter()
                engine.step([token_id], [position], [0], mode=mode)
                times_s[mode.name].append(time.perf_counter() - started)
        num_rounds += 1
    return ModeTrial({name: 1 / max(1e-9, median(times)) for name, times in times_s.items()})


def saved_trial(
    modes: Sequence[str], key: Mapping[str, Any], try_modes: Callable[[], ModeTrial]
) -> ModeTrial:
    """The trial of these modes saved under this key; else `try_modes` now, saved for later.

    `key`: all that speed depends on, as JSON. Systems that try at the same time all take the trial
    that was saved first.
    Errors:  those of `try_modes`
    """
    try:
        path = trial_path(key)
    except OSError:
        return try_modes()
    found = _read(path, modes)
    if found is not None:
        return found
    tried = try_modes()
    with suppress(OSError):
        if _read(path, modes) is None:
            path.unlink(missing_ok=True)  # it is damaged
        write_if_absent(path, json.dumps(tried.tokens_per_s).encode())
    first = _read(path, modes)  # perhaps of another system, which tried meanwhile
    if first is None:
        return tried
    return replace(first, is_saved=first.tokens_per_s != tried.tokens_per_s)


def trial_path(key: Mapping[str, Any]) -> Path:
    """The file, below XDG_CACHE_HOME or ~/.cache. Errors: OSError where no folder is only ours."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return own_folder("modes") / f"{digest}.json"


def _read(path: Path, modes: Sequence[str]) -> ModeTrial | None:
    """The saved trial; None where there is none, or it is damaged."""
    try:
        speeds = json.loads(path.read_bytes())
        is_whole = list(speeds) == list(modes)
        is_whole = is_whole and all(isinstance(speed, float) for speed in speeds.values())
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return ModeTrial(speeds, str(path), is_saved=True) if is_whole else None
