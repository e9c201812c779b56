"""RMSNorm and LayerNorm of one vector at a time."""

import math

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.vectors import copy_numbers

# Not full fastmath, which breaks NaN checks. Symbols are named by the set's order, which for a
# literal differs between a module's source and its bytecode.
_REORDER = "reassoc", "contract", "nsz", "arcp"
RMS_NORM, LAYER_NORM = 0, 1
LANES = 512  # of `lane_rms_norm_kernel`


def norm_kind(name: str) -> np.int32:
    """The number of "rmsnorm" or "layernorm", of the type in a layer's record."""
    return np.int32({"rmsnorm": RMS_NORM, "layernorm": LAYER_NORM}[name])


@njit(nogil=True, cache=True, fastmath=set(_REORDER))
def rms_norm_kernel(x, weight, epsilon, out):
    """out = x / sqrt(mean(x^2) + epsilon) * weight; checks nothing.

    Source:  Zhang and Sennrich, arXiv 1910.07467
    """
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    scale = np.float32(1.0 / math.sqrt(total / x.shape[0] + epsilon))
    for i in range(x.shape[0]):
        out[i] = x[i] * scale * weight[i]


@njit(nogil=True, cache=True, fastmath=set(_REORDER))
def layer_norm_kernel(x, weight, bias, epsilon, out):
    """out = (x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias; checks nothing.

    Source:  Ba, Kiros and Hinton, arXiv 1607.06450
    """
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i]
    mean = np.float32(total / x.shape[0])
    squares = np.float32(0)
    for i in range(x.shape[0]):
        squares += (x[i] - mean) * (x[i] - mean)
    scale = np.float32(1.0 / math.sqrt(squares / x.shape[0] + epsilon))
    for i in range(x.shape[0]):
        out[i] = (x[i] - mean) * scale * weight[i]
    if bias.shape[0]:
        for i in range(x.shape[0]):
            out[i] += bias[i]


@njit(nogil=True, cache=True)
def norm_kernel(kind, x, weight, bias, epsilon, out):
    """The norm of kind RMS_NORM or LAYER_NORM; a norm without weights copies x. No checks."""
    if weight.shape[0] == 0:
        copy_numbers(x, out)
    elif kind == 0:
        rms_norm_kernel(x, weight, epsilon, out)
    else:
        layer_norm_kernel(x, weight, bias, epsilon, out)


@njit(nogil=True, cache=True)
def sum_of_lanes(lanes):
    """The sum of lanes in an order that GPUs have too; the lanes are overwritten.

    Of groups of 32 lanes in a tree, then of the groups in order.
    """
    total = np.float32(0)
    for first in range(0, lanes.shape[0], 32):
        group, count = lanes[first : first + 32], 16
        while count:
            for lane in range(count):
                group[lane] += group[lane + count]
            count //= 2
        total += group[0]
    return total


@njit(nogil=True, cache=True, _nrt=True)
def lane_rms_norm_kernel(x, weight, epsilon, out):
    """`rms_norm_kernel` to the last bit as a GPU has it (cuda_kernels/csrc/norm.cu); no checks.

    Every 512th square goes to the same sum.
    """
    lanes = np.zeros(LANES, np.float32)
    for first in range(0, x.shape[0], LANES):
        for lane in range(min(LANES, x.shape[0] - first)):
            lanes[lane] += x[first + lane] * x[first + lane]
    mean = sum_of_lanes(lanes) / np.float32(x.shape[0])
    scale = np.float32(1) / np.sqrt(mean + np.float32(epsilon))
    for i in range(x.shape[0]):
        out[i] = x[i] * scale * weight[i]


@njit(nogil=True, cache=True)
def add_normed_kernel(kind, x, weight, bias, epsilon, normed, total):
    """normed = the norm of x, total += normed; total is float64. No checks."""
    norm_kernel(kind, x, weight, bias, epsilon, normed)
    for i in range(x.shape[0]):
        total[i] += normed[i]
