"""How much each layer leaves out: bytes are saved where they cost least (TEAL's greedy choice).

A small error of a layer's FFN output costs KL divergence in proportion to its square, and what
several layers cost adds up:  KL = sum over layers of sensitivity[l] * error[l].  For any price each
layer takes the thresholds of the least bytes + price * KL; of all prices the one is taken at which
the sum just keeps within the budget. Greedy steps by gain over cost end at the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotcold.numba_kernels.decode.activations import Thresholds
from hotcold.predictors.magnitude_curve import LayerCurve

_HALVINGS = 50
_PRICES = 1e-9, 1e15  # shares of bytes for a nat


@dataclass(frozen=True)
class Choice:
    """Thresholds of one layer, and what they are expected to read and to move."""

    thresholds: Thresholds
    up_share: float
    down_share: float
    error: float


def choose(curve: LayerCurve, up_weight: float, price: float) -> Choice:
    """The pair of the least up_weight * up + (1 - up_weight) * down + price * error.

    `up_weight` is the share of the up row in the bytes of up and down.
    """
    read = up_weight * curve.up_shares[:, None] + (1 - up_weight) * curve.down_shares
    i, j = np.unravel_index(np.argmin(read + price * curve.errors), read.shape)
    return Choice(
        Thresholds(np.float32(curve.gate_thresholds[i]), np.float32(curve.product_thresholds[j])),
        float(curve.up_shares[i]),
        float(curve.down_shares[i, j]),
        float(curve.errors[i, j]),
    )


def allocate(
    curves: Sequence[LayerCurve], sensitivities: Sequence[float], up_weight: float, budget: float
) -> list[Choice]:
    """Thresholds of all layers that are expected to cost `budget` nats of KL, or a little less."""

    def at(price: float) -> list[Choice]:
        return [
            choose(curve, up_weight, price * sensitivity)
            for curve, sensitivity in zip(curves, sensitivities, strict=True)
        ]

    def cost(choices: list[Choice]) -> float:
        found = zip(choices, sensitivities, strict=True)
        return sum(sensitivity * choice.error for choice, sensitivity in found)

    low, high = np.log(_PRICES)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if cost(at(np.exp(middle))) > budget:
            low = middle
        else:
            high = middle
    return at(np.exp(high))


def alike(curve: LayerCurve, up_weight: float, error_share: float) -> Choice:
    """The cheapest thresholds of a layer that leave out at most a share of all its c^2."""
    return allocate([curve], [1.0], up_weight, error_share * float(curve.errors.max()))[0]
