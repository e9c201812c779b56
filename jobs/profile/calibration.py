"""Thresholds for a model whose activations are never zero: each layer is tried alone, then all.

First the dense model reads some windows of a text, and every pair of thresholds is counted on its
layers' inputs. Then the running system measures the cost of one layer's error, layer by layer, and
the budget is allocated to layers. Last the whole is measured, and allocated again if it costs too
much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from hotcold.actors.driver.prompts import Prompts
from hotcold.actors.system import System
from hotcold.jobs.profile.answers import Answers
from hotcold.jobs.support.console import steps_bar
from hotcold.jobs.support.text_file import TextIds
from hotcold.model.config import neurons
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import UsageError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.numba_kernels.decode.activations import Thresholds
from hotcold.placement.profile import ActivationProfile
from hotcold.placement.solver.cost import RowBytes
from hotcold.predictors.fitting.magnitudes import (
    Choice,
    LayerCurve,
    alike,
    allocate,
    layer_magnitudes,
)
from hotcold.predictors.magnitude_thresholds import Calibrated, LayerThresholds

WINDOW = 256  # positions, an opening token included
_MAX_WINDOWS = 4
_UNSCORED = 16  # first positions, whose tokens have little before them
_MIN_IDS = 32
_LOGITS_BYTES = 512 << 20  # dense logits that the driver keeps
_ALONE = 0.05  # share of c^2 that a layer leaves out when it is tried alone
_MAX_ROUNDS = 6
_ENOUGH = 0.9  # of the target


@dataclass(frozen=True)
class Windows:
    """Parts of a text, each with the opening token of texts if there is one."""

    ids: list[list[int]]
    num_opening: int

    @classmethod
    def of(cls, text: TextIds, prompts: Prompts, config: ModelConfig, most: int | None) -> Windows:
        """Spread evenly over the text; at most `most` of its tokens. Errors: UsageError."""
        opening = [] if prompts.bos_id is None else [prompts.bos_id]
        size = min(WINDOW, config.max_positions) - len(opening)
        count = max(1, min(_MAX_WINDOWS, _LOGITS_BYTES // (4 * size * config.vocab_size)))
        num_ids = min(text.ids.size, count * size if most is None else most)
        if num_ids < min(_MIN_IDS, size):
            raise UsageError(
                f"{text.name}: {num_ids} tokens are too few to calibrate thresholds; give at least "
                f"{min(_MIN_IDS, size)}"
            )
        count = min(count, -(-num_ids // size))
        size = min(size, num_ids // count)
        starts = [(text.ids.size - size) * i // max(1, count - 1) for i in range(count)]
        return cls([opening + text.ids[i : i + size].tolist() for i in starts], len(opening))

    @property
    def num_logits(self) -> int:
        """Rows of dense logits that the driver keeps."""
        return sum(len(ids) for ids in self.ids)


class Calibration:
    """One calibration, on a system whose services have the norms of down rows."""

    def __init__(
        self,
        running: System,
        path: Path,
        config: ModelConfig,
        windows: Windows,
        step: Callable[[], None],
        served: RowBytes,
    ) -> None:
        """`config` has the formats that weights are loaded in; `step` is called after each step.

        `served` has those that the thresholds are for. Where it reads all of down, leaving out down
        rows costs and saves nothing, so the gates' thresholds get the whole budget.
        """
        self._running, self._config, self._windows, self._step = running, config, windows, step
        self._checkpoint = Checkpoint(path)
        self._up_weight = 1.0 if served.reads_all_down else served.up / served.rest

    def run(self, target_kld: float, text: TextIds) -> tuple[Calibrated, ActivationProfile]:
        """Thresholds that cost at most `target_kld` nats, and the profile of their neurons."""
        inputs, weights = self._inputs()
        curves = []
        for found in layer_magnitudes(self._checkpoint, self._config, inputs, weights):
            curves.append(LayerCurve.of(found))
            self._step()
        choices, mean_kld = self._allocate(curves, self._sensitivities(curves), target_kld)
        calibrated = Calibrated(
            _layer_thresholds([choice.thresholds for choice in choices]),
            mean_kld,
            target_kld,
            np.array([choice.up_share for choice in choices]),
            np.array([choice.down_share for choice in choices]),
            text.digest,
        )
        counts = self._counts(inputs, weights, choices)
        chosen = distances = None
        if weights is not None:
            chosen = np.count_nonzero(weights, axis=1)
            self._answer(text)
            distances = self._running.call("expert_distances")
        profile = ActivationProfile(
            counts, inputs.shape[1], text.name, text.digest, chosen, distances
        )
        return calibrated, profile

    def _answer(self, text: TextIds) -> None:
        """Count how soon experts are chosen again while the model writes itself."""
        opening, size = self._windows.ids[0][: self._windows.num_opening], len(self._windows.ids[0])
        answers = Answers.of(text.ids.size, size - len(opening))
        ids = text.ids.tolist()
        for number in range(answers.count):
            answers.profile(self._running, ids, number, next(iter(opening), None))

    def _inputs(self) -> tuple[np.ndarray, np.ndarray | None]:
        """The FFN inputs of all windows' tokens: (L, T, d) float16 bits.

        Of a mixture, also what each block weighs for them: (L, T, B) float32.
        """
        found, weights = [], []
        for ids in self._windows.ids:
            own = ids[self._windows.num_opening :]
            found.append(self._running.call("profile_window", own, list(range(len(own)))))
            if self._config.experts is not None:
                weights.append(self._running.call("recorded_weights"))
            self._step()
        return np.concatenate(found, axis=1), np.concatenate(weights, axis=1) if weights else None

    def _sensitivities(self, curves: list[LayerCurve]) -> list[float]:
        """The cost of each layer's error in nats, from a trial of that layer alone."""
        silent = Thresholds(np.float32(0), np.float32(0))
        found = []
        for layer, curve in enumerate(curves):
            choice = alike(curve, self._up_weight, _ALONE)
            trial = [silent] * len(curves)
            trial[layer] = choice.thresholds
            cost = self._kld(trial, self._windows.ids[:1])
            found.append(max(cost, 1e-12) / max(choice.error, 1e-30))
            self._step()
        return found

    def _allocate(
        self, curves: list[LayerCurve], sensitivities: list[float], target_kld: float
    ) -> tuple[list[Choice], float]:
        """Allocate budgets until one costs the target or a little less."""
        budget = target_kld
        best: tuple[list[Choice], float] | None = None
        for _ in range(_MAX_ROUNDS):
            choices = allocate(curves, sensitivities, self._up_weight, budget)
            measured = self._kld([choice.thresholds for choice in choices], self._windows.ids)
            self._step()
            if measured <= target_kld and (best is None or measured > best[1]):
                best = choices, measured
            if _ENOUGH * target_kld <= measured <= target_kld:
                break
            budget *= min(4.0, (1 + _ENOUGH) / 2 * target_kld / max(measured, 1e-12))
        if best is None:
            raise UsageError(
                f"no thresholds keep a KL divergence of {target_kld:g}; give a larger --target-kl"
            )
        return best

    def _kld(self, thresholds: list[Thresholds], windows: list[list[int]]) -> float:
        found = _layer_thresholds(thresholds)
        parts = [
            self._running.call("try_thresholds", ids, min(_UNSCORED, len(ids) // 2), found)
            for ids in windows
        ]
        return max(0.0, float(np.concatenate(parts).mean()))

    def _counts(
        self, inputs: np.ndarray, weights: np.ndarray | None, choices: list[Choice]
    ) -> np.ndarray:
        """For how many tokens a neuron's up and down rows are read, on average of the two."""
        counts = np.zeros(neurons.shape(self._config), np.int64)
        magnitudes = layer_magnitudes(self._checkpoint, self._config, inputs, weights)
        for own, found, choice in zip(counts, magnitudes, choices, strict=True):
            thresholds = choice.thresholds
            up, down = found.rows_read(float(thresholds.gate), float(thresholds.product))
            own[: up.size] = (up + down + 1) // 2
            self._step()
        return counts


def _layer_thresholds(thresholds: list[Thresholds]) -> LayerThresholds:
    gate, product = np.array(thresholds, np.float32).T.copy()
    return LayerThresholds(gate, product)


@contextmanager
def calibration_bar(config: ModelConfig, windows: Windows) -> Iterator[Callable[[], None]]:
    """A bar on standard error, and what moves it by a step of `Calibration`."""
    total, taken = len(windows.ids) + 3 * config.num_layers + _MAX_ROUNDS, count(1)
    with steps_bar("calibrating", total) as show:
        yield lambda: show(next(taken))
