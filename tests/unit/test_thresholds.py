"""Thresholds on data whose posterior is known: how near they come to those of one who knows it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hotcold.predictors.fitting.thresholds import MarginFit, least_margin
from hotcold.predictors.predictor_file import Quality

pytestmark = pytest.mark.usefixtures("one_torch_thread")
NUM_TOKENS, NUM_NEURONS = 6000, 300


class Known:
    """z = slope * e + shift + noise * normal, with numbers of each neuron's own."""

    def __init__(self, seed: int) -> None:
        self._source = torch.Generator().manual_seed(seed)
        self.slope = 0.2 + 3 * torch.rand(NUM_NEURONS, generator=self._source)
        self.shift = 3 * torch.randn(NUM_NEURONS, generator=self._source) - 3
        self.noise = 0.2 + 2 * torch.rand(NUM_NEURONS, generator=self._source)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Estimates and pre-activations of tokens never drawn before, (T, N) each."""
        shape = (NUM_TOKENS, NUM_NEURONS)
        e = 2 * torch.randn(shape, generator=self._source) + 1
        noise = self.noise * torch.randn(shape, generator=self._source)
        return e, self.slope * e + self.shift + noise

    def probability(self, e: Tensor) -> Tensor:
        """That the neuron fires, given its estimate."""
        return 0.5 * torch.erfc(-(self.slope * e + self.shift) / self.noise / math.sqrt(2))


@pytest.mark.parametrize("target", [0.9, 0.999])
def test_as_few_neurons_as_one_who_knows(target: float) -> None:
    known = Known(1)
    fit = MarginFit.of(*known.draw())
    e, z = known.draw()
    thresholds = fit.thresholds(least_margin(fit.margins(e), z > 0, target))
    e, z = known.draw()
    fires, computed = z > 0, e > thresholds
    quality = Quality.of(computed, fires)
    assert quality.recall == pytest.approx(target, abs=0.2 * (1 - target) + 0.001)
    # Who knows takes the likeliest first until these tokens' recall is reached.
    order = known.probability(e).flatten().argsort(descending=True)
    found = fires.flatten()[order].cumsum(0)
    num_best = int((found < quality.recall * found[-1]).sum()) + 1
    assert int(computed.sum()) <= 1.02 * num_best
    assert 0.1 < quality.active < quality.computed < 0.9 or target < 0.9
