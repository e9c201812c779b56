"""Filters of tokens that few requests ask for: top-n-sigma, typical, XTC, Mirostat.

Passes over the logits, no sort of all: in NumPy, but for what that does number by number.
"""

import math
from typing import Literal

import numpy as np

from hotcold.numba_kernels.checks import float_array, require
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.sampling import (
    argmax_kernel,
    draw,
    largest,
    space_of,
    sum_of,
    weigh,
)

_BINS = 1024  # by which candidates are told apart before some of them are sorted
_MIROSTAT_TOKENS = 100  # by which Mirostat 1 estimates the slope, m of its paper


def sample_filtered(
    logits: np.ndarray,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    top_n_sigma: float = -1.0,
    typical_p: float = 1.0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    uniform: float,
    chance: float = 0.0,
) -> int:
    """Choose a token id, with the filters of llama.cpp in its order.

    top_n_sigma n > 0 keeps logits of at least max - n * std, of those that are finite; `top_k` as
    in `sample`; `typical_p` the smallest set of tokens whose -log p is nearest to the entropy and
    whose probability exceeds it; `top_p` and `min_p` as in `sample`. Where `chance`, a number in
    [0, 1) like `uniform`, is less than `xtc_probability`, the tokens of at least `xtc_threshold`
    are left out but the least likely of them. `top_p` and `min_p` compare probabilities at the
    temperature, typical_p and XTC those at 1, of the tokens that are left.
    Shapes:  logits (V,) float32
    Errors:  ValueError on a wrong shape or dtype, or a NaN among the logits
    Source:  llama.cpp's sampler chain; Meister et al. 2022 (typical)
    """
    logits, best = _checked(logits, temperature)
    if temperature == 0.0 or top_k == 1 or not np.isfinite(logits[best]):
        return best
    ids = _candidates(logits, top_k, top_n_sigma)
    if typical_p < 1.0:
        ids = _among(ids, _most_typical(_of(logits, ids), typical_p))
    if top_p < 1.0 or min_p > 0.0:
        ids = _among(ids, _likeliest(_of(logits, ids), temperature, top_p, min_p))
    if chance < xtc_probability:
        ids = _among(ids, _without_top(_of(logits, ids), xtc_threshold))
    weights = _weights(_of(logits, ids), temperature)
    place = _drawn(weights, uniform)
    return place if ids is None else int(ids[place])


def _of(logits: np.ndarray, ids: np.ndarray | None) -> np.ndarray:
    """The logits of some ids, or of all."""
    return logits if ids is None else logits[ids]


def _among(ids: np.ndarray | None, places: np.ndarray) -> np.ndarray:
    """The ids at some places."""
    return places if ids is None else ids[places]


def sample_mirostat(
    logits: np.ndarray, *, version: int, temperature: float, mu: float, uniform: float
) -> tuple[int, float]:
    """Choose a token id; returns it, and its surprise in bits among those that were left.

    Version 2 leaves out tokens of more surprise than `mu` bits. Version 1 keeps the k likeliest,
    k by Zipf's law from `mu` and the slope of the first 100. One token is always left. Whoever
    calls lowers `mu`, 2 * tau at first, by eta * (surprise - tau).
    Shapes:  logits (V,) float32
    Errors:  ValueError on a wrong shape or dtype, or a NaN among the logits
    Source:  Basu et al. 2021, as llama.cpp computes it
    """
    logits, best = _checked(logits, temperature)
    if temperature == 0.0 or not np.isfinite(logits[best]):
        return best, 0.0
    if version == 1:
        ids = largest(logits, _zipf_count(logits, temperature, mu))
        ids = ids[logits[ids] > -np.inf]
        weights = _weights(logits[ids], temperature)
    else:
        weights = _weights(logits, temperature)
        log_least = math.log(weights.sum()) - mu * math.log(2.0)
        # The likeliest weighs 1.
        ids = np.flatnonzero(weights >= math.exp(log_least)) if log_least <= 0 else np.array([best])
        weights = weights[ids]
    place = _drawn(weights, uniform)
    return int(ids[place]), -math.log2(weights[place] / weights.sum())


def _checked(logits: np.ndarray, temperature: float) -> tuple[np.ndarray, int]:
    """The logits, and the first of the largest."""
    require(logits.ndim == 1 and logits.size > 0, "logits must be a vector of at least one")
    logits = float_array("logits", logits, logits.shape)
    require(temperature >= 0, "temperature must be at least 0")
    best = int(argmax_kernel(logits))
    require(best >= 0, "the logits hold a NaN")
    return logits, best


def _weights(values: np.ndarray, temperature: float) -> np.ndarray:
    """exp((v - max v) / temperature), in float64, until it is called again."""
    weights = space_of("weights", values.size, np.float64)
    weigh(values, np.float64(values.max()), float(temperature), weights)
    return weights


def _candidates(logits: np.ndarray, top_k: int, top_n_sigma: float) -> np.ndarray | None:
    """Ids of what top_n_sigma and top_k leave, and that are possible at all; None: of all."""
    ids = None
    if top_n_sigma > 0:
        finite = logits.astype(np.float64)
        finite = finite if finite.min() > -np.inf else finite[finite > -np.inf]
        ids = np.flatnonzero(logits >= finite.max() - top_n_sigma * finite.std())
    size = logits.size if ids is None else ids.size
    if 0 < top_k < size:
        ids = largest(logits, top_k) if ids is None else ids[largest(logits[ids], top_k)]
    if ids is None:
        return None if logits.min() > -np.inf else np.flatnonzero(logits > -np.inf)
    return ids[logits[ids] > -np.inf]


def _most_typical(values: np.ndarray, share: float) -> np.ndarray:
    weights = _weights(values, 1.0)
    total = weights.sum()
    surprises, products = (space_of(n, values.size, np.float64) for n in ("surprises", "products"))
    most = float(values.max() + math.log(total))
    _surprise(values, most, total, weights, surprises, products)
    surprises -= products.sum()
    distances = np.abs(surprises, out=surprises)
    return _first_that_hold(distances, weights, share, "right")


@njit(nogil=True, cache=True, error_model="numpy")
def _surprise(values, most, total, weights, surprises, products):  # type: ignore[no-untyped-def]
    """Divide `weights` by their total; of each its -log p, and p times that."""
    for i in range(values.shape[0]):
        weights[i] /= total
        surprises[i] = most - values[i]
        products[i] = weights[i] * surprises[i]


def _likeliest(values: np.ndarray, temperature: float, top_p: float, min_p: float) -> np.ndarray:
    weights = _weights(values, temperature)
    if top_p >= 1.0:
        return np.flatnonzero(weights >= min_p)
    kept = _first_that_hold(-values, weights, top_p * weights.sum(), "left")
    return kept[weights[kept] >= min_p]


def _first_that_hold(
    keys: np.ndarray, weights: np.ndarray, wanted: float, side: Literal["left", "right"]
) -> np.ndarray:
    """The fewest places, by rising keys, that weigh `wanted`, or more than it ("right").

    Only those are sorted whose keys are near the last one's.
    """
    before, near = np.empty(0, np.int64), np.arange(keys.size)
    low, span = keys.min(), float(keys.max() - keys.min())
    if keys.size > _BINS and 0 < span < np.inf:
        bins = ((keys - low) * np.float64((_BINS - 1) / span)).astype(np.int16)
        held = np.cumsum(np.bincount(bins, weights, _BINS))
        last = min(int(np.searchsorted(held, wanted, side=side)), _BINS - 1)
        before, near = np.flatnonzero(bins < last), np.flatnonzero(bins == last)
        wanted -= held[last - 1] if last else 0.0
    near = near[np.argsort(keys[near], kind="stable")]
    count = 1 + int(np.searchsorted(np.cumsum(weights[near]), wanted, side=side))
    return np.concatenate([before, near[:count]])


def _without_top(values: np.ndarray, threshold: float) -> np.ndarray:
    weights = _weights(values, 1.0)
    is_top = weights >= threshold * weights.sum()
    if threshold > 0.5 or np.count_nonzero(is_top) < 2:
        return np.arange(values.size)
    top = np.flatnonzero(is_top)
    is_top[top[np.argmin(values[top])]] = False
    return np.flatnonzero(~is_top)


def _drawn(weights: np.ndarray, uniform: float) -> int:
    """The place whose share of the summed weights has `uniform` in it."""
    return int(draw(weights, float(sum_of(weights)), uniform))


def _zipf_count(logits: np.ndarray, temperature: float, mu: float) -> int:
    """k = (e * 2^mu / (1 - V^-e))^(1/s), with s the slope by the likeliest tokens and e = s - 1."""
    size = logits.size
    top = logits[largest(logits, min(size, _MIROSTAT_TOKENS))].astype(np.float64)
    top = top[top > -np.inf]
    if top.size < 2:
        return 1
    steps = np.log(np.arange(2, top.size + 1) / np.arange(1, top.size))
    slope = float(-np.diff(top) / temperature @ steps / (steps @ steps))
    excess, log_size = slope - 1.0, math.log(size)
    if abs(excess) < 1e-9:
        log_numerator = mu * math.log(2.0) - math.log(log_size)
    else:
        share = -math.expm1(-excess * log_size) / excess
        log_numerator = mu * math.log(2.0) - math.log(share)
    if log_numerator <= 0:
        return 1
    if log_numerator >= slope * log_size:
        return size
    return max(1, int(math.exp(log_numerator / slope)))
