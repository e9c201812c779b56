"""The mode of a step: which neurons it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hotcold.actors.protocol.messages import THRESHOLD
from hotcold.model.config.model_config import ModelConfig
from hotcold.numba_kernels.decode.activations import ALL_FIRE, Thresholds, not_zero
from hotcold.numba_kernels.serve.mailbox import TARGET, threshold_words
from hotcold.numba_kernels.serve.selector import Selector, all_neurons
from hotcold.predictors.predictor import NeuronPredictor


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
