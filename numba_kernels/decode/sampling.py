"""Choosing the next token from logits: greedy, or top-k, top-p and min-p sampling."""

import math
import threading

import numpy as np

from hotcold.numba_kernels.checks import float_array, require
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.finite import INFINITE, MAGNITUDE

_PIECE = 512  # logits
_MOST = np.int32(2**31 - 1)
_LARGEST_HEAP = 512
_FEW = 64  # logits that mostly hold what top_p and min_p keep
_DIGIT_BITS = 11  # of a radix sort of 32 bits
_DIGIT_MASK, _FIRST_SHIFT = np.uint32((1 << _DIGIT_BITS) - 1), 32 - _DIGIT_BITS
_LAST_RANK = 0xFFFFFFFF
_LEAST_POWER = -708.0  # of e, whose number is a normal one
_LOG2_E = 1 / math.log(2)
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_WHOLE = 1.5 * 2.0**52  # added, it leaves a whole number in the lowest bits


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
    for first in range(count, logits.shape[0], _PIECE):
        some = logits[first : first + _PIECE]
        if _ends_kernel(some)[1] <= _ends_kernel(values[:1])[1]:
            continue
        for i in range(some.shape[0]):
            if some[i] > values[0]:
                values[0], ids[0] = some[i], first + i
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


@njit(nogil=True, cache=True, _nrt=True, error_model="numpy")
def weigh(logits, top, temperature, out):
    """out[i] = exp((logits[i] - top) / temperature), of logits up to `top`; returns their sum.

    In loops of many numbers at once, which libm's exp is not: 2^k e^r with |r| <= ln 2 / 2, e^r by
    its series. Below e^-708 it is 0.
    """
    powers = np.empty(_PIECE, np.float64)
    bits = powers.view(np.int64)
    scale = 1.0 / max(temperature, 1e-300)
    for first in range(0, logits.shape[0], _PIECE):
        some, weights = logits[first : first + _PIECE], out[first : first + _PIECE]
        for i in range(some.shape[0]):
            x = max((some[i] - top) * scale, _LEAST_POWER)
            weights[i] = x
            powers[i] = x * _LOG2_E + _WHOLE
        for i in range(some.shape[0]):
            whole = powers[i] - _WHOLE
            r = weights[i] - whole * _LN2_HIGH - whole * _LN2_LOW
            weights[i] = 0.0 if weights[i] == _LEAST_POWER else _series(r)
        for i in range(some.shape[0]):
            bits[i] = (bits[i] + 1023) << 52
        for i in range(some.shape[0]):
            weights[i] *= powers[i]
    return sum_of(out)


@njit(nogil=True, cache=True, inline="always")
def _series(r):
    total = r * (1 / 6227020800) + 1 / 479001600
    total = total * r + 1 / 39916800
    total = total * r + 1 / 3628800
    total = total * r + 1 / 362880
    total = total * r + 1 / 40320
    total = total * r + 1 / 5040
    total = total * r + 1 / 720
    total = total * r + 1 / 120
    total = total * r + 1 / 24
    total = total * r + 1 / 6
    total = total * r + 0.5
    return (total * r + 1.0) * r + 1.0


@njit(nogil=True, cache=True, _nrt=True)
def _rank(logits, ranks):
    """Unsigned numbers in the order of `largest`, the largest logit's first."""
    bits = logits.view(np.int32)
    for i in range(bits.shape[0]):
        sign = bits[i] >> np.int32(31)
        ranks[i] = np.uint32(_MOST - np.int32(((bits[i] & MAGNITUDE) ^ sign) - sign))


@njit(nogil=True, cache=True)
def sum_of(numbers):
    """Their sum: of every fourth one, as a sum of one after the other waits for each."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    whole = numbers.shape[0] & ~3
    for i in range(0, whole, 4):
        a += numbers[i]
        b += numbers[i + 1]
        c += numbers[i + 2]
        d += numbers[i + 3]
    for i in range(whole, numbers.shape[0]):
        a += numbers[i]
    return (a + b) + (c + d)


@njit(nogil=True, cache=True, _nrt=True)
def _sums_by_digit(ranks, amounts):
    """The sum of amounts for each first digit of a rank; of neighbours apart, then together."""
    sums = np.zeros((2, 1 << _DIGIT_BITS), np.float64)
    for i in range(0, ranks.shape[0] - 1, 2):
        sums[0, ranks[i] >> _FIRST_SHIFT] += amounts[i]
        sums[1, ranks[i + 1] >> _FIRST_SHIFT] += amounts[i + 1]
    if ranks.shape[0] & 1:
        sums[0, ranks[-1] >> _FIRST_SHIFT] += amounts[-1]
    for digit in range(sums.shape[1]):
        sums[0, digit] += sums[1, digit]
    return sums[0]


@njit(nogil=True, cache=True)
def _reached_digit(sums, before, wanted):
    """The digit at which sums reach `wanted`, else the last of some amount; the sum before it."""
    last, least, reached = 0, before, before
    for digit in range(sums.shape[0]):
        if sums[digit] > 0.0:
            last, least = digit, reached
            reached += sums[digit]
            if reached >= wanted:
                break
    return last, least


@njit(nogil=True, cache=True, _nrt=True)
def _reach(ranks, amounts, sums, wanted, space):
    """The place, in order of rank and then of index, at which amounts reach `wanted`; their sum.

    The last one of some amount where they do not. `sums` are `_sums_by_digit`. A digit of ranks
    after the other, among those that have the digits before: nothing is sorted.
    """
    digit, before = _reached_digit(sums, 0.0, wanted)
    ids, count = space, 0
    for i in range(ranks.shape[0]):
        ids[count] = np.int32(i)
        count += int(ranks[i] >> _FIRST_SHIFT == digit)
    ids = ids[:count]
    for shift in (_FIRST_SHIFT - _DIGIT_BITS, 0):
        first = ranks[ids[0]]
        is_one = True
        for i in ids:
            is_one = is_one and ranks[i] == first
        if is_one:
            break
        own = np.zeros(1 << _DIGIT_BITS, np.float64)
        for i in ids:
            own[(ranks[i] >> shift) & _DIGIT_MASK] += amounts[i]
        digit, before = _reached_digit(own, before, wanted)
        count = 0
        for i in ids:
            ids[count] = i
            count += int((ranks[i] >> shift) & _DIGIT_MASK == digit)
        ids = ids[:count]
    place, reached = ids[0], before
    for i in ids:
        if amounts[i] > 0.0:
            place = i
            reached += amounts[i]
            if reached >= wanted:
                break
    return place, reached


@njit(nogil=True, cache=True, _nrt=True)
def _choose_ranked(logits, weights, total, top_k, top_p, min_p, uniform, ranks, ids):
    """`_choose` among all; `weights` are overwritten, `ranks` and `ids` are space."""
    _rank(logits, ranks)
    if 0 < top_k < logits.shape[0]:
        ones = np.ones(logits.shape[0], np.uint8)
        place, _ = _reach(ranks, ones, _sums_by_digit(ranks, ones), float(top_k), ids)
        last = ranks[place]
        for i in range(ranks.shape[0]):
            is_kept = ranks[i] < last or (ranks[i] == last and i <= place)
            weights[i] = weights[i] if is_kept else 0.0
        total = sum_of(weights)
    place, sums = -1, np.empty(0, np.float64)
    if top_p < 1.0 or min_p == 0.0:
        sums = _sums_by_digit(ranks, weights)
        place, total = _reach(ranks, weights, sums, top_p * total, ids)
    if min_p > 0.0:
        last = np.uint32(_LAST_RANK) if place < 0 else ranks[place]
        for i in range(weights.shape[0]):
            is_kept = ranks[i] < last or (ranks[i] == last and (place < 0 or i <= place))
            weights[i] = weights[i] if is_kept and weights[i] >= min_p else 0.0
        total, sums = sum_of(weights), _sums_by_digit(ranks, weights)
    wanted = min(np.nextafter(uniform * total, np.inf), total)
    chosen = _reach(ranks, weights, sums, wanted, ids)[0]
    if min_p == 0.0 and (ranks[chosen], chosen) > (ranks[place], place):
        return place  # another order of sums rounds differently
    return chosen


@njit(nogil=True, cache=True)
def draw(weights, total, uniform):
    """The place whose share of `total`, the sum of `weights`, has `uniform` in it."""
    target, first = uniform * total, 0
    while first + _PIECE < weights.shape[0]:
        own = sum_of(weights[first : first + _PIECE])
        if target < own:
            break
        target -= own
        first += _PIECE
    place = first
    for i in range(first, weights.shape[0]):
        target -= weights[i]
        if target < 0:
            return i
        place = i if weights[i] > 0.0 else place
    while weights[place] == 0.0 and place > 0:  # rounding
        place -= 1
    return place


@njit(nogil=True, cache=True, _nrt=True)
def sample_kernel(logits, temperature, top_k, top_p, min_p, uniform, weights, ranks, ids):
    """One token id; see `sample`. Checks nothing; -1 if a logit is NaN. The last three are space:

    Shapes:  weights float64, ranks uint32, ids int32 (V,)
    """
    best = argmax_kernel(logits)
    if best < 0 or temperature == 0.0 or top_k == 1 or not np.isfinite(logits[best]):
        return best
    size = logits.shape[0]
    if 0 < top_k <= min(size - 1, _LARGEST_HEAP):
        top = largest(logits, top_k)
        total = 0.0
        for i in top:
            total += math.exp((logits[i] - logits[best]) / temperature)
        chosen = _choose(logits, top, temperature, top_p, min_p, total, uniform)
        return chosen if chosen >= 0 else top[-1]
    total = weigh(logits, logits[best], temperature, weights)
    if top_p >= 1.0 and min_p == 0.0 and not 0 < top_k < size:
        return draw(weights, total, uniform)
    if top_k == 0:
        top = largest(logits, min(size, _FEW))
        chosen = _choose(logits, top, temperature, top_p, min_p, total, uniform)
        if chosen >= 0:
            return chosen
    return _choose_ranked(logits, weights, total, top_k, top_p, min_p, uniform, ranks, ids)


_scratch = threading.local()


def space_of(name: str, size: int, dtype: type) -> np.ndarray:
    """An array of whatever was there, which the next call in this thread gives again by that name.

    Memory that is new at each token takes as long as the work.
    """
    found: np.ndarray | None = getattr(_scratch, name, None)
    if found is None or found.size < size:
        found = np.empty(size, dtype)
        setattr(_scratch, name, found)
    return found[:size]


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
    kinds = {"weights": np.float64, "ranks": np.uint32, "ids": np.int32}
    space = (space_of(name, logits.size, kind) for name, kind in kinds.items())
    chosen = int(sample_kernel(logits, float(temperature), top_k, *shares, *space))
    require(chosen >= 0, "the logits hold a NaN")
    return chosen
