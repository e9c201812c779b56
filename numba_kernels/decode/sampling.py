"""Choosing the next token from logits: greedy, or top-k, top-p and min-p sampling."""

import math

import numpy as np

from hotcold.numba_kernels.checks import float_array, require
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.finite import INFINITE, MAGNITUDE

_PIECE = 512  # logits
_MOST = np.int32(2**31 - 1)
_LARGEST_HEAP = 512
_DIGIT_BITS = 11  # of a radix sort of 32 bits


@njit(nogil=True, cache=True)
def _ends_kernel(numbers):
    """The least and the largest of float32 numbers, as integers in the same order; -0 is 0."""
    bits = numbers.view(np.int32)
    least, most = _MOST, -_MOST
    for i in range(bits.shape[0]):
        sign = bits[i] >> np.int32(31)
        value = np.int32(((bits[i] & MAGNITUDE) ^ sign) - sign)
        least, most = min(least, value), max(most, value)
    return least, most


@njit(nogil=True, cache=True)
def argmax_kernel(logits):
    """The lowest index of the largest logit, or -1 if a logit is NaN; checks nothing.

    Integers are compared, many at once, to find the piece that has the largest.
    """
    place, lowest, best = 0, _MOST, -_MOST
    for first in range(0, logits.shape[0], _PIECE):
        least, most = _ends_kernel(logits[first : first + _PIECE])
        place, lowest, best = first if most > best else place, min(lowest, least), max(best, most)
    if best > INFINITE or lowest < -INFINITE:
        return -1
    while _ends_kernel(logits[place : place + 1])[1] != best:
        place += 1
    return place


@njit(nogil=True, cache=True, inline="always")
def _is_before(values, ids, one, other):
    if values[one] == values[other]:
        return ids[one] < ids[other]
    return values[one] > values[other]


@njit(nogil=True, cache=True)
def _sift_down(values, ids, count, parent):
    """Restore a heap of `count` whose root is the last in order, where `parent` alone breaks it."""
    while True:
        child = 2 * parent + 1
        if child >= count:
            return
        if child + 1 < count and _is_before(values, ids, child, child + 1):
            child += 1
        if _is_before(values, ids, child, parent):
            return
        values[parent], values[child] = values[child], values[parent]
        ids[parent], ids[child] = ids[child], ids[parent]
        parent = child


@njit(nogil=True, cache=True, _nrt=True)
def _sorted_ids(logits):
    """Ids of all logits, in the order of `largest`: a radix sort, from the last digit on."""
    bits, size = logits.view(np.int32), logits.shape[0]
    keys, ids, other = np.empty(size, np.int64), np.arange(size), np.empty(size, np.int64)
    for i in range(size):
        sign = bits[i] >> np.int32(31)
        keys[i] = np.int64(_MOST) - np.int32(((bits[i] & MAGNITUDE) ^ sign) - sign)
    for shift in range(0, 32, _DIGIT_BITS):
        ends = np.zeros((1 << _DIGIT_BITS) + 1, np.int64)
        for i in range(size):
            ends[((keys[i] >> shift) & ((1 << _DIGIT_BITS) - 1)) + 1] += 1
        for digit in range(1 << _DIGIT_BITS):
            ends[digit + 1] += ends[digit]
        for i in range(size):
            digit = (keys[ids[i]] >> shift) & ((1 << _DIGIT_BITS) - 1)
            other[ends[digit]] = ids[i]
            ends[digit] += 1
        ids, other = other, ids
    return ids


@njit(nogil=True, cache=True, _nrt=True)
def largest(logits, count):
    """Ids of the `count` largest logits, largest first, of equal ones the lowest id first.

    A few by a heap of that size, many by sorting all; checks nothing.
    """
    if count > _LARGEST_HEAP:
        return _sorted_ids(logits)[:count]
    values, ids = logits[:count].copy(), np.arange(count)
    for parent in range(count // 2 - 1, -1, -1):
        _sift_down(values, ids, count, parent)
    for i in range(count, logits.shape[0]):
        if logits[i] > values[0]:
            values[0], ids[0] = logits[i], i
            _sift_down(values, ids, count, 0)
    for last in range(count - 1, 0, -1):
        values[0], values[last] = values[last], values[0]
        ids[0], ids[last] = ids[last], ids[0]
        _sift_down(values, ids, last, 0)
    return ids


@njit(nogil=True, cache=True, _nrt=True)
def _choose(logits, ids, temperature, top_p, min_p, total, uniform):
    """The id drawn from sorted candidates, or -1 if they hold less than top_p of `total`."""
    top = logits[ids[0]]
    kept, mass = 0, 0.0
    for i in range(ids.shape[0]):
        weight = math.exp((logits[ids[i]] - top) / temperature)
        if kept and (mass >= top_p * total or weight < min_p):
            break
        mass += weight
        kept += 1
    if kept == ids.shape[0] and ids.shape[0] < logits.shape[0] and mass < top_p * total:
        return -1
    target = uniform * mass
    for i in range(kept):
        target -= math.exp((logits[ids[i]] - top) / temperature)
        if target < 0:
            return ids[i]
    return ids[kept - 1]


@njit(nogil=True, cache=True, _nrt=True)
def _choose_any(logits, best, temperature, total, uniform):
    target = uniform * total
    for i in range(logits.shape[0]):
        target -= math.exp((logits[i] - logits[best]) / temperature)
        if target < 0:
            return i
    return best


@njit(nogil=True, cache=True)
def _total(logits, best, temperature):
    total = 0.0
    for i in range(logits.shape[0]):
        total += math.exp((logits[i] - logits[best]) / temperature)
    return total


@njit(nogil=True, cache=True, _nrt=True)
def sample_kernel(logits, temperature, top_k, top_p, min_p, uniform):
    """One token id; see `sample`. Checks nothing; -1 if a logit is NaN."""
    best = argmax_kernel(logits)
    if best < 0 or temperature == 0.0 or top_k == 1 or logits[best] == np.inf:
        return best
    size = logits.shape[0]
    if 0 < top_k < size:
        ids = largest(logits, top_k)
        total = 0.0
        for i in ids:
            total += math.exp((logits[i] - logits[best]) / temperature)
        chosen = _choose(logits, ids, temperature, top_p, min_p, total, uniform)
        return chosen if chosen >= 0 else ids[-1]
    total = _total(logits, best, temperature)
    if top_p >= 1.0 and min_p == 0.0:
        return _choose_any(logits, best, temperature, total, uniform)
    count, chosen = min(size, 64), -1
    while chosen < 0:
        ids = largest(logits, count)
        chosen = _choose(logits, ids, temperature, top_p, min_p, total, uniform)
        count = min(size, count * 8) if count < _LARGEST_HEAP else size
    return chosen


def sample(
    logits: np.ndarray,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    uniform: float,
) -> int:
    """Choose a token id.

    The logits are cut to the `top_k` largest (0: all), then to the smallest set whose share of
    probability at this temperature reaches `top_p`, then to those at least `min_p` times as likely
    as the likeliest; `uniform` in [0, 1) picks one by its share. temperature 0 is greedy, and
    top_p 0 keeps only the likeliest.
    Shapes:  logits (V,) float32
    Errors:  ValueError on a wrong shape or dtype, an option out of range, or a NaN among the logits
    """
    require(logits.ndim == 1 and logits.size > 0, "logits must be a vector of at least one")
    logits = float_array("logits", logits, logits.shape)
    require(temperature >= 0, "temperature must be at least 0")
    require(top_k >= 0, "top_k must be at least 0")
    require(0 <= top_p <= 1, "top_p must lie in [0, 1]")
    require(0 <= min_p <= 1, "min_p must lie in [0, 1]")
    require(0 <= uniform < 1, "uniform must lie in [0, 1)")
    shares = (float(top_p), float(min_p), float(uniform))  # an int would compile it anew
    chosen = int(sample_kernel(logits, float(temperature), top_k, *shares))
    require(chosen >= 0, "the logits hold a NaN")
    return chosen
