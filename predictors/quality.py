"""How good a predictor is. Importing this does not import torch, which takes a second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Quality:
    """How well a layer's predictor does on tokens that it was not fitted to. Shares of 1."""

    recall: float  # of the neurons that fire, how many are computed
    precision: float  # of the neurons computed, how many fire
    computed: float  # of all neurons
    active: float  # of all neurons, those that fire

    @classmethod
    def of(cls, computed: Tensor, fires: Tensor) -> Quality:
        """Compare. Shapes: both (T, N) bool."""
        both = int((computed & fires).sum())
        num_computed, num_fires = int(computed.sum()), int(fires.sum())
        return cls(
            recall=both / num_fires if num_fires else 1.0,
            precision=both / num_computed if num_computed else 1.0,
            computed=num_computed / computed.numel(),
            active=num_fires / fires.numel(),
        )

    @classmethod
    def of_all(cls, fires: Tensor) -> Quality:
        """Where all neurons are computed. Shapes: (T, N) bool."""
        active = int(fires.sum()) / fires.numel()
        return cls(recall=1.0, precision=active, computed=1.0, active=active)
