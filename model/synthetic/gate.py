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
_PREDICTOR_SHIFT = 0.5  # deviations of z, by which a predictor favours neurons


@dataclass(frozen=True)
class GateRows:
    """Gate rows (N, D), their pre-activations (T, N) on the inputs, and a predictor of them.

    fc1 (2 r + 1, D), fc2 (N, 2 r + 1), of r low-rank parts: fc2 . relu(fc1 . x) is the
    pre-activation without its noise, and a little more, so that few that fire are left out.
    """

    rows: torch.Tensor
    pre_activations: torch.Tensor
    predictor: tuple[torch.Tensor, torch.Tensor]


def make_gate_rows(
    inputs: torch.Tensor,
    num_fitted: int,
    num_neurons: int,
    density: float,
    bias: torch.Tensor | None,
    source: NormalSource,
    rank: int = LOW_RANK,
) -> GateRows:
    """Make gate rows for which `density` of the neurons fire on the first `num_fitted` inputs.

    `rank` is that of their low-rank part; less in small models.
    Shapes:  inputs (T, D), bias (N,) or None, added to the pre-activations
    Dtypes:  float32
    """
    fitted = inputs[:num_fitted]
    direction = torch.nn.functional.normalize(fitted.mean(dim=0), dim=0)
    hidden = inputs.shape[1]
    rank = max(1, min(rank, hidden // 8))
    rows = source.normal((num_neurons, hidden), ((1 - LOW_RANK_SHARE) / hidden) ** 0.5)
    left = source.normal((num_neurons, rank), (LOW_RANK_SHARE / rank) ** 0.5)
    right = source.normal((rank, hidden), hidden**-0.5)
    rows.addmm_(left, right)
    rows.addr_(rows @ direction, direction, alpha=-1)
    lengths = rows.norm(dim=1, keepdim=True)
    rows.div_(lengths)
    left.div_(lengths)
    along = inputs @ direction
    across = inputs @ rows.T
    if bias is not None:
        across += bias
    falling = torch.from_numpy(power_law_rates(num_neurons, density))
    rates = falling[source.permutation(num_neurons)]
    weights = _fit_weights(rates, along[:num_fitted], across[:num_fitted], density)
    shift = _PREDICTOR_SHIFT * float(across.std() / along.mean())
    rows.addr_(weights, direction)
    # A low-rank part p is relu(p) - relu(-p). All inputs are positive along the direction, which is
    # there twice, each for half of its part: 2 r + 2 rows can be whole groups of quantized weights.
    half = (weights + shift - left @ (right @ direction))[:, None] / 2
    fc1 = torch.cat([right, -right, direction[None], direction[None]])
    fc2 = torch.cat([left, -left, half, half], dim=1)
    return GateRows(rows, across.addr_(along, weights), (fc1, fc2))


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
