"""Random gate rows whose neurons fire at chosen rates, in patterns that can be predicted.

Row n is a_n * s + b_n. `s` is the direction of the mean FFN input, along which every input has a
reliable positive part c; b_n is orthogonal to it, of length 1, low-rank plus noise. So the
pre-activation is a_n * c + z with z of mean 0 and spread sigma, and the neuron fires with
probability Phi(a_n * mean(c) / sigma): a_n sets its rate, b_n says on which inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hotcold.model.sparsity import power_law_rates
from hotcold.model.synthetic.random_source import NormalSource

LOW_RANK = 64
LOW_RANK_SHARE = 0.8  # of the variance of z; the rest is noise to a low-rank predictor
_SHIFT_BISECTIONS = 16  # of a range of 8 deviations


@dataclass(frozen=True)
class GateRows:
    """Gate rows (N, D), and their pre-activations (T, N) on the inputs."""

    rows: torch.Tensor
    pre_activations: torch.Tensor


def make_gate_rows(
    inputs: torch.Tensor,
    num_fitted: int,
    num_neurons: int,
    density: float,
    bias: torch.Tensor | None,
    source: NormalSource,
) -> GateRows:
    """Make gate rows for which `density` of the neurons fire on the first `num_fitted` inputs.

    Shapes:  inputs (T, D), bias (N,) or None, added to the pre-activations
    Dtypes:  float32
    """
    fitted = inputs[:num_fitted]
    direction = torch.nn.functional.normalize(fitted.mean(dim=0), dim=0)
    rows = _residual_rows(num_neurons, inputs.shape[1], direction, source)
    along = inputs @ direction
    across = inputs @ rows.T
    if bias is not None:
        across += bias
    falling = torch.from_numpy(power_law_rates(num_neurons, density))
    rates = falling[source.permutation(num_neurons)]
    weights = _fit_weights(rates, along[:num_fitted], across[:num_fitted], density)
    rows.addr_(weights, direction)
    return GateRows(rows, across.addr_(along, weights))


def _residual_rows(
    num_neurons: int, hidden: int, direction: torch.Tensor, source: NormalSource
) -> torch.Tensor:
    """Return low-rank plus noise rows of length 1, orthogonal to `direction`."""
    rank = max(1, min(LOW_RANK, hidden // 8))
    rows = source.normal((num_neurons, hidden), ((1 - LOW_RANK_SHARE) / hidden) ** 0.5)
    left = source.normal((num_neurons, rank), (LOW_RANK_SHARE / rank) ** 0.5)
    right = source.normal((rank, hidden), hidden**-0.5)
    rows.addmm_(left, right)
    rows.addr_(rows @ direction, direction, alpha=-1)
    return rows.div_(rows.norm(dim=1, keepdim=True))


def _fit_weights(
    rates: torch.Tensor, along: torch.Tensor, across: torch.Tensor, density: float
) -> torch.Tensor:
    """Return a_n so that neurons fire at about `rates`, and all of them at exactly `density`.

    The normal law gives a_n up to a common shift of the quantiles, which is found by bisection on
    the pre-activations themselves.
    """
    quantiles = torch.special.ndtri(rates).float()
    mean, spread = along.mean(), across.std()
    # Neuron n's spread is sigma and that of a_n * c together; the bound keeps tiny models solvable.
    ratio = (quantiles.square() * along.var() / mean.square()).clip(max=0.75)
    slopes = spread / (mean * (1 - ratio).sqrt())
    low, high = -4.0, 4.0
    for _ in range(_SHIFT_BISECTIONS):
        shift = (low + high) / 2
        weights = (quantiles + shift) * slopes
        is_low = float((across + along[:, None] * weights > 0).float().mean()) < density
        low, high = (shift, high) if is_low else (low, shift)
    return (quantiles + high) * slopes
