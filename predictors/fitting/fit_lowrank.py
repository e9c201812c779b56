"""Fits low-rank predictors in closed form, with the hidden size that costs a token least.

The gate rows are known, so the best linear estimate of rank k of all pre-activations is known too:
with C = L L' the second moment of the inputs and U S V' the largest singular triples of G L, it is
U S (V' L^-1) x. A ReLU between the two layers lets such a unit pass where it is positive. Inputs
after a norm have a direction m along which all are positive (m . x is nearly 1), so a multiple of m
added to each row keeps the unit positive, and one more unit, m itself, takes it out again; where
inputs have no such direction each unit gets a twin of opposite sign. `up` is then least squares.
Training by gradient descent from there gains little (docs/decisions.md).
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hotcold.model.sparsity import hot_share
from hotcold.predictors.fitting.layer_data import LayerData
from hotcold.predictors.fitting.thresholds import MarginFit, least_margin
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.predictor_file import Quality

_SHIFT = 2.5  # deviations by which a unit is shifted above zero
_MAX_SPREAD = 0.3  # of m . x around 1, for it to shift the others
DTYPES = ("float16", "int8")
_UNIT = 16  # hidden sizes are multiples of it
_GROWTH = 1.25
_SLACK = 32  # extra singular vectors, which make the randomised ones exact enough
_RIDGE = 1e-6
_MIN_SHRINKAGE = 1e-4


@dataclass(frozen=True)
class _Basis:
    """Hidden units in the order of their use: down (r, d); the constant unit comes first.

    `twins`: each unit but the first is followed by its opposite.
    """

    down: Tensor
    gram: Tensor  # (r, r), of the hidden activations on the fit tokens
    cross: Tensor  # (r, N), of the hidden activations with the pre-activations


@dataclass(frozen=True)
class _Candidate:
    """A predictor of one size, with its cost, and its quality on the check tokens."""

    layer: LowRankLayer
    quality: Quality
    token_cost: float  # of the predictor, and of the gate rows it selects


def fit_lowrank(data: LayerData, target_recall: float) -> tuple[LowRankLayer, Quality]:
    """Return the low-rank predictor that reaches the target recall and costs a token least.

    Any size reaches any recall, by computing more neurons. The search starts at a size that follows
    from the layer's sparsity, and grows or shrinks it while the cost falls: the predictor's bytes
    and the gate rows it selects; in float16 and in int8.
    """
    max_size = max(_UNIT, min(data.gate.shape[1] // 2, 1024) // _UNIT * _UNIT)
    search = _Search(data, target_recall, max_size)
    start = _start_size(data, max_size)
    best = min((search.climb(start, dtype) for dtype in DTYPES), key=lambda c: c.token_cost)
    return best.layer, best.quality


def _start_size(data: LayerData, max_size: int) -> int:
    """Denser and less skewed layers start larger, as in PowerInfer section 5.1."""
    rates = data.fit.fires.float().mean(dim=0)
    share = (float(rates.mean()) * hot_share(rates.double().numpy())) ** 0.5
    return min(max_size, max(_UNIT, round(data.gate.shape[1] * share / 2 / _UNIT) * _UNIT))


class _Search:
    def __init__(self, data: LayerData, target_recall: float, max_size: int) -> None:
        self._data = data
        self._target = target_recall
        self._max_size = max_size
        self._basis = _make_basis(data, max_size)
        self._found: dict[tuple[int, str], _Candidate] = {}

    def climb(self, size: int, dtype: str) -> _Candidate:
        """Grow, then shrink `size` by a quarter at a time while the cost of a token falls."""
        best = self._candidate(size, dtype)
        for step in (_larger, _smaller):
            while (following := step(best.layer.hidden_size, self._max_size)) is not None:
                candidate = self._candidate(following, dtype)
                if candidate.token_cost >= best.token_cost:
                    break
                best = candidate
        return best

    def _candidate(self, size: int, dtype: str) -> _Candidate:
        if (size, dtype) not in self._found:
            self._found[size, dtype] = self._evaluate(size, dtype)
        return self._found[size, dtype]

    def _evaluate(self, size: int, dtype: str) -> _Candidate:
        """Fit a predictor of that hidden size and format."""
        data, basis = self._data, self._basis
        gram = basis.gram[:size, :size].double()
        ridge = _RIDGE * torch.eye(size, dtype=torch.float64) * gram.diagonal().mean()
        up = torch.linalg.solve(gram + ridge, basis.cross[:size].double()).float()
        layer = _stored(basis.down[:size], up, dtype)
        margins = MarginFit.of(_estimates(layer, data.fit.inputs), data.fit.pre_activations)
        calibration = margins.margins(_estimates(layer, data.calibrate.inputs))
        least = least_margin(calibration, data.calibrate.fires, self._target)
        thresholds = margins.thresholds(least)
        computed = _estimates(layer, data.check.inputs) > thresholds
        quality = Quality.of(computed, data.check.fires)
        layer = replace(layer, thresholds=thresholds.numpy())
        return _Candidate(layer, quality, data.token_cost(layer, quality.computed))


def _larger(size: int, max_size: int) -> int | None:
    larger = min(max_size, max(size + _UNIT, round(size * _GROWTH / _UNIT) * _UNIT))
    return larger if larger > size else None


def _smaller(size: int, max_size: int) -> int | None:
    smaller = max(_UNIT, min(size - _UNIT, round(size / _GROWTH / _UNIT) * _UNIT))
    return smaller if smaller < size else None


def _make_basis(data: LayerData, size: int) -> _Basis:
    x, z = data.fit.inputs, data.fit.pre_activations
    moment = _second_moment(x)
    factor = torch.linalg.cholesky(moment)
    count = min(size + _SLACK, *data.rows.shape)
    torch.manual_seed(0)
    _, _, right = torch.svd_lowrank(data.rows @ factor, q=count, niter=4)
    # Rows of V' L^-1: their values on the inputs have a mean square of 1.
    rows = torch.linalg.solve_triangular(factor, right.T, upper=False, left=False)
    constant = torch.cholesky_solve(x.mean(dim=0)[:, None], factor)[:, 0]
    level = x @ constant
    constant = constant / level.mean()
    if float(level.std() / level.mean()) < _MAX_SPREAD:
        spread = (x @ rows.T).std(dim=0)
        down = torch.cat([constant[None], rows + _SHIFT * spread[:, None] * constant])
    else:
        down = torch.stack([rows, -rows], dim=1).flatten(0, 1)
    down = down[:size]
    hidden = torch.relu(x @ down.T)
    return _Basis(down, hidden.T @ hidden, hidden.T @ z)


def _second_moment(x: Tensor) -> Tensor:
    """x' x / T, shrunk towards a multiple of the identity the more, the fewer tokens there are.

    Source:  Ledoit and Wolf, A well-conditioned estimator for large-dimensional covariance
             matrices, 2004, lemma 3.3
    """
    num_tokens, width = x.shape
    moment = x.T @ x / num_tokens
    level = moment.diagonal().mean()
    distance = moment.square().sum() - width * level.square()
    error = (x.square().sum(dim=1).square().sum() / num_tokens - moment.square().sum()) / num_tokens
    shrinkage = float((error / distance.clamp_min(1e-30)).clamp(_MIN_SHRINKAGE, 1))
    identity = torch.eye(width) * level.clamp_min(1e-30)
    return (1 - shrinkage) * moment + shrinkage * identity


def _stored(down: Tensor, up: Tensor, dtype: str) -> LowRankLayer:
    """The two matrices in float16, or in int8 with scales; thresholds are empty."""
    sizes = up.abs().amax(dim=1).clamp_min(1e-30)  # ReLU lets positive factors pass
    down, up = down * sizes[:, None], up / sizes[:, None]
    reach = down.abs().amax(dim=1).clamp_min(1e-30)
    none = np.empty(0, np.float32)
    if dtype == "float16":
        return LowRankLayer(_float16(down / reach[:, None]), reach.numpy(), _float16(up), none)
    column_reach = up.abs().amax(dim=0).clamp_min(1e-30)
    return LowRankLayer(
        _int8(down / reach[:, None]), (reach / 127).numpy(), _int8(up / column_reach), none
    )


def _float16(values: Tensor) -> np.ndarray:
    return np.ascontiguousarray(values.numpy(), np.float16).view(np.uint16)


def _int8(values: Tensor) -> np.ndarray:
    return np.ascontiguousarray((values * 127).round().to(torch.int8).numpy())


def _estimates(layer: LowRankLayer, inputs: Tensor) -> Tensor:
    """The kernel's scores before thresholds are subtracted, (T, N)."""
    hidden = torch.relu(inputs @ _widened(layer.down).T) * torch.from_numpy(layer.scales)
    return hidden @ _widened(layer.up)


def _widened(array: np.ndarray) -> Tensor:
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.float16).astype(np.float32))
    return torch.from_numpy(array.astype(np.float32))
