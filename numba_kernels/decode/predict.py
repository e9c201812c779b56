"""Predicting which neurons fire: scores of a layer's neurons, and the list of those above zero.

Sign predictor: the pre-activation gate[n] . x is estimated from weights and input of a few bits.
Odd numbers w = sum over p < P of 2**p * (2 w_bit[p] - 1) and
q = sum over k < 3 of 2**k * (2 q_bit[k] - 1) have

    sum over i of w[i] * q[i]
        = (2**P - 1) * 7 * d - 2 * sum over p, k of 2**(p + k) * popcount(w_bits[p] ^ q_bits[k])

P is 1, signs alone, or 2, signs and one of two magnitudes. Low-rank predictor: two bias-free linear
layers with ReLU between, as in PowerInfer.
"""

import math

import numpy as np

from hotcold.numba_kernels.checks import float_array, require
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.norm import sum_of_lanes
from hotcold.numba_kernels.decode.rows import rows_kernel
from hotcold.numba_kernels.ir.bit_ir import (
    INPUT_PLANES,
    MAX_WEIGHT_PLANES,
    weighted_count1,
    weighted_count2,
)
from hotcold.numba_kernels.ir.vector_ir import axpy

LANES = 256  # sums of an input's squares, of every 256th number each; a power of two
_LEVELS_SPAN = 2.5  # the largest level stands for so many root mean squares of the input
_LARGE = 0.9957  # root mean squares
_NO_BIAS = np.empty(0, np.float32)


@njit(nogil=True, cache=True, _nrt=True)
def _sum_of_squares(x, center, scale):
    """The sum of ((x - center) * scale)^2 in an order that GPUs have too: by lanes."""
    lanes = np.zeros(LANES, np.float32)
    for first in range(0, x.shape[0], LANES):
        for lane in range(min(LANES, x.shape[0] - first)):
            value = (x[first + lane] - center[first + lane]) * scale[first + lane]
            lanes[lane] += value * value
    return sum_of_lanes(lanes)


@njit(nogil=True, cache=True)
def pack_planes_kernel(x, center, scale, planes):
    """Bit planes of (x - center) * scale; returns the unit of q; checks nothing.

    q[i] is the odd number in -7..7 nearest to the value in units that put 7 at `_LEVELS_SPAN` root
    mean squares.
    Shapes:  x, center, scale (d,), planes (3, ceil(d / 64)) uint64
    """
    width, squares = x.shape[0], _sum_of_squares(x, center, scale)
    planes[:] = 0
    if not 0 < squares < np.inf:
        return squares * np.float32(0)  # NaN unless x is the center: then all scores are NaN too
    top = (1 << INPUT_PLANES) - 1
    unit = np.float32(math.sqrt(squares / width) * _LEVELS_SPAN / top)
    half = np.float32(0.5) / unit
    for i in range(width):
        # (q + top) / 2 is the whole number 0..top whose bits the planes hold.
        level = (x[i] - center[i]) * scale[i] * half + np.float32(0.5) * np.float32(top + 1)
        code = np.uint64(min(max(level, np.float32(0)), np.float32(top)))
        word, bit = i >> 6, np.uint64(i & 63)
        for k in range(INPUT_PLANES):
            planes[k, word] |= ((code >> np.uint64(k)) & np.uint64(1)) << bit
    return unit


@njit(nogil=True, cache=True)
def sign_scores_kernel(bits, planes, unit, width, thresholds, out, first, last):
    """out[n] = unit * (sum over i of w[n, i] * q[i]) - thresholds[n], n in first..last-1.

    Checks nothing.
    Shapes:  bits (N, P * W), planes (3, W) uint64; thresholds, out (N,) float32
    """
    num_weight_planes = bits.shape[1] // planes.shape[1]
    most = ((1 << num_weight_planes) - 1) * ((1 << INPUT_PLANES) - 1) * width
    for n in range(first, last):
        if num_weight_planes == 1:
            count = weighted_count1(bits, n, planes)
        else:
            count = weighted_count2(bits, n, planes)
        out[n] = unit * np.float32(most - 2 * count) - thresholds[n]


@njit(nogil=True, cache=True)
def lowrank_hidden_kernel(down, scales, x, out, first, last):
    """out[t, j] = scales[j] * max(0, down[j] . x[t]) for j in first..last-1; checks nothing.

    Shapes:  down (r, d), scales (r,), x (T, d), out (T, r)
    """
    rows_kernel(down, _NO_BIAS, x, out, first, last)
    for t in range(x.shape[0]):
        for j in range(first, last):
            out[t, j] = scales[j] * max(out[t, j], np.float32(0))


@njit(nogil=True, cache=True, _nrt=True)
def lowrank_scores_kernel(up, hidden, thresholds, out, first, last):
    """out[n] = sum over j of hidden[j] * up[j, n] - thresholds[n] for n in first..last-1.

    Silent hidden units cost nothing. Checks nothing.
    Shapes:  up (r, N), hidden (r,), thresholds, out (N,)
    """
    part, columns = out[first:last], up[:, first:last]
    for n in range(part.shape[0]):
        part[n] = -thresholds[first + n]
    active = np.empty(4, np.int64)
    count = 0
    for j in range(hidden.shape[0]):
        if hidden[j] != 0:
            active[count] = j
            count += 1
        if count == 4:
            a, b, c, d = active[0], active[1], active[2], active[3]
            factors = hidden[a], hidden[b], hidden[c], hidden[d]
            axpy(part, columns, (a, b, c, d), factors)
            count = 0
    for i in range(count):
        axpy(part, columns, (active[i],), (hidden[active[i]],))


@njit(nogil=True, cache=True)
def select_kernel(scores, begin, end, ids, token_masks):
    """List n - begin for n in begin..end-1 where scores[t, n] > 0 for some t; checks nothing.

    A NaN score counts as above zero: the neuron is computed, and the NaN reaches the output.
    Bit t of token_masks[i] is set where scores[t, n] > 0. Returns the number of ids.
    Shapes:  scores (T, N) float32, T <= 32; ids (>= end - begin,) int32,
             token_masks too, uint32
    """
    count = 0
    if scores.shape[0] == 1:
        for n in range(begin, end):
            ids[count] = n - begin
            count += not scores[0, n] <= 0
        return count
    for n in range(begin, end):
        mask = np.uint32(0)
        for t in range(scores.shape[0]):
            if not scores[t, n] <= 0:
                mask |= np.uint32(1) << np.uint32(t)
        if mask:
            ids[count] = n - begin
            token_masks[count] = mask
            count += 1
    return count


def pack_weights(weights: np.ndarray, num_weight_planes: int) -> np.ndarray:
    """Weight rows in one or two bits an item, as bit planes.

    One: w = 1 where the weight is above zero, else -1. Two: w is -3, -1, 1 or 3, three where the
    weight exceeds about the row's root mean square: the optimal four-level quantizer of a normal
    distribution (Max, Quantizing for minimum distortion, 1960).
    Shapes:  weights (N, d) float32, result (N, num_weight_planes * ceil(d / 64)) uint64: plane by
             plane, item i is bit i % 64 of word i // 64
    """
    require(1 <= num_weight_planes <= MAX_WEIGHT_PLANES, "num_weight_planes must be 1 or 2")
    positive = weights > 0
    if num_weight_planes == 1:
        return _packed(positive)
    rms = np.sqrt(np.mean(np.square(weights), axis=1, keepdims=True))
    large = np.abs(weights) > _LARGE * rms
    return np.concatenate([_packed(positive == large), _packed(positive)], axis=1)


def _packed(flags: np.ndarray) -> np.ndarray:
    number, width = flags.shape
    padded = np.zeros((number, -(-width // 64) * 64), bool)
    padded[:, :width] = flags
    return np.packbits(padded, axis=1, bitorder="little").view("<u8").astype(np.uint64, copy=False)


def sign_scores(
    bits: np.ndarray,
    x: np.ndarray,
    thresholds: np.ndarray,
    center: np.ndarray,
    scale: np.ndarray,
) -> np.ndarray:
    """Scores of the sign predictor for several tokens.

    out[t, n] = unit[t] * (sum over i of w[n, i] * q[t, i]) - thresholds[n], where unit[t] * q[t, i]
    is (x[t, i] - center[i]) * scale[i] in three bits
    Shapes:  bits (N, P * ceil(d / 64)); x (T, d); thresholds (N,); center, scale (d,); out (T, N)
    Dtypes:  bits uint64 as in `pack_weights`; the rest float32
    Errors:  ValueError on any mismatch
    Source:  SparseInfer (arXiv 2411.12692), with more bits of the input and perhaps of the weights
    """
    num_neurons, width = bits.shape[0], center.shape[0]
    words = -(-width // 64)
    require(bits.dtype == np.uint64 and bits.flags.c_contiguous, "bits must be rows of uint64")
    require(
        bits.shape[1] in [words * p for p in range(1, MAX_WEIGHT_PLANES + 1)],
        f"bits must be rows of one or two bits for each of {width} items",
    )
    x = float_array("x", x, (x.shape[0], width))
    thresholds = float_array("thresholds", thresholds, (num_neurons,))
    center = float_array("center", center, (width,))
    scale = float_array("scale", scale, (width,))
    out = np.empty((x.shape[0], num_neurons), np.float32)
    planes = np.empty((INPUT_PLANES, words), np.uint64)
    for t in range(x.shape[0]):
        unit = pack_planes_kernel(x[t], center, scale, planes)
        sign_scores_kernel(bits, planes, unit, width, thresholds, out[t], 0, num_neurons)
    return out
