"""Negative log-likelihood of tokens, and KL divergence from the dense model.

Sums are float64 over float32 logits, so that they add nothing to the logits' own rounding.
"""

import math
from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.checks import float_array, require
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.sampling import argmax_kernel


class Comparison(NamedTuple):
    """One position's `compare_logits`, all in nats but `same_top`."""

    nll_dense: float
    nll: float
    kld: float
    same_top: bool


@njit(nogil=True, cache=True)
def log_sum_exp_kernel(logits):
    """The lowest index of the largest logit, and log(sum over v of exp(logits[v])).

    The sum is NaN where a logit is NaN or the largest is infinite. Checks nothing.
    Shapes:  logits (V,) float32
    """
    best = argmax_kernel(logits)
    if best < 0 or not math.isfinite(logits[best]):
        return best, np.nan
    top, total = np.float64(logits[best]), 0.0
    for i in range(logits.shape[0]):
        total += math.exp(np.float64(logits[i]) - top)
    return best, top + math.log(total)


@njit(nogil=True, cache=True)
def nll_kernel(logits, target):
    """-log softmax(logits)[target]; NaN as in `log_sum_exp_kernel`. Checks nothing."""
    return log_sum_exp_kernel(logits)[1] - np.float64(logits[target])


@njit(nogil=True, cache=True)
def compare_kernel(dense_logits, logits, target):
    """`compare_logits` without checks; NaN as in `log_sum_exp_kernel`."""
    dense_best, dense_sum = log_sum_exp_kernel(dense_logits)
    best, log_sum = log_sum_exp_kernel(logits)
    kld = 0.0
    for i in range(logits.shape[0]):
        dense_log_p = np.float64(dense_logits[i]) - dense_sum
        p = math.exp(dense_log_p)
        if p != 0:  # a NaN counts, and 0 * log(0 / q) is 0
            kld += p * (dense_log_p - (np.float64(logits[i]) - log_sum))
    nll_dense = dense_sum - np.float64(dense_logits[target])
    return nll_dense, log_sum - np.float64(logits[target]), kld, dense_best == best


def negative_log_likelihood(logits: np.ndarray, target: int) -> float:
    """-log softmax(logits)[target], in nats.

    Shapes:  logits (V,) float32
    Errors:  ValueError on a wrong shape, dtype or target, or where the result is not finite
    """
    logits = _checked(logits, target)
    nll = float(nll_kernel(logits, target))
    _require_finite(nll)
    return nll


def compare_logits(dense_logits: np.ndarray, logits: np.ndarray, target: int) -> Comparison:
    """One position's logits beside those of the dense model, p_dense and p their softmax.

    nll_dense = -log p_dense[target], nll = -log p[target],
    kld = sum over v of p_dense[v] * (log p_dense[v] - log p[v]),
    same_top: whether both have the same likeliest token, the first of equals
    Shapes:  dense_logits, logits (V,) float32
    Errors:  ValueError on a wrong shape, dtype or target, or where a result is not finite
    Source:  llama.cpp, tools/perplexity/perplexity.cpp
    """
    logits = _checked(logits, target)
    dense_logits = float_array("dense_logits", dense_logits, logits.shape)
    nll_dense, nll, kld, same_top = compare_kernel(dense_logits, logits, target)
    _require_finite(nll_dense + nll + kld)
    return Comparison(nll_dense, nll, kld, bool(same_top))


def _checked(logits: np.ndarray, target: int) -> np.ndarray:
    require(logits.ndim == 1 and logits.size > 0, "logits must be a vector of at least one")
    require(0 <= target < logits.size, f"target must lie in 0..{logits.size - 1}")
    return float_array("logits", logits, logits.shape)


def _require_finite(value: float) -> None:
    require(math.isfinite(value), "the logits hold a NaN or an infinite number")
