"""Fits a threshold for every neuron such that a layer reaches a target recall.

A predictor's estimate e of a pre-activation z has an error. With a line fitted to each neuron,
z = slope * e + shift + noise * normal, the neuron fires with probability Phi(margin),
margin = (slope * e + shift) / noise. Computing the neurons whose margin is above one value for
the whole layer reaches a given recall with the fewest neurons.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_TINY = 1e-12
_MAX_PAIRS = 4_000_000  # for a quantile: of more pairs a sample is as good


@dataclass(frozen=True)
class MarginFit:
    """Each neuron's line from estimate to pre-activation. Shapes: (N,) each."""

    slope: Tensor
    shift: Tensor
    noise: Tensor

    @classmethod
    def of(cls, estimates: Tensor, pre_activations: Tensor) -> "MarginFit":
        """Least squares over tokens, neuron by neuron. Shapes: both (T, N) float32."""
        e_mean, z_mean = estimates.mean(dim=0), pre_activations.mean(dim=0)
        e, z = estimates - e_mean, pre_activations - z_mean
        variance = e.square().mean(dim=0)
        slope = (e * z).mean(dim=0) / variance.clamp_min(_TINY)
        # A constant or negatively correlated estimate must not select a neuron.
        slope = torch.where(variance > _TINY, slope, 0).clamp_min(0)
        noise = (z - slope * e).square().mean(dim=0).sqrt().clamp_min(_TINY)
        shift = z_mean - slope * e_mean
        # Exactly zero on every token, as of a pruned row: it never fires.
        shift = torch.where((shift == 0) & (noise <= _TINY), -1, shift)
        return cls(slope, shift, noise)

    def margins(self, estimates: Tensor) -> Tensor:
        """Return how many deviations above zero each neuron is expected. Shapes: (T, N)."""
        return (self.slope * estimates + self.shift) / self.noise

    def thresholds(self, least_margin: float) -> Tensor:
        """Return the estimates (N,) at the margin `least_margin`; infinite where it is constant."""
        never = torch.where(self.shift > least_margin * self.noise, -torch.inf, torch.inf)
        finite = (least_margin * self.noise - self.shift) / self.slope
        return torch.where(self.slope > 0, finite, never)


def least_margin(margins: Tensor, fires: Tensor, target_recall: float) -> float:
    """Return the margin above which `target_recall` of the (token, neuron) pairs that fire lie.

    Shapes:  margins (T, N) float32, fires (T, N) bool
    """
    found = margins[fires]
    if not found.numel():
        return float("inf")
    found = found[:: -(-found.numel() // _MAX_PAIRS)]
    rank = int((1 - target_recall) * found.numel())
    return float(found.kthvalue(max(rank, 1)).values) - 1e-6
