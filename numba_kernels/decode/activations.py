"""Activation functions of one number."""

import math

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def activate(code, value):
    """relu, silu or gelu (exact, by erf) of one number; a NaN stays NaN."""
    if code == 0:
        return np.float32(0) if value <= 0 else value
    if code == 1:
        return np.float32(value / (1.0 + math.exp(-value)))
    return np.float32(0.5 * value * (1.0 + math.erf(value * 0.7071067811865476)))
