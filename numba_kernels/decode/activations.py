"""Activation functions of one number, and the thresholds by which neurons fire."""

import math
from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.checks import (
    CLAMPED_SILU,
    CLAMPED_SLOPE,
    DRELU,
    FATRELU,
    GELU,
    GELU_TANH,
    RELU,
    SILU,
    activation_code,
)
from hotcold.numba_kernels.compiler import njit

_SQRT_HALF = 0.7071067811865476
_TANH_SCALE = 0.7978845608028654  # sqrt(2 / pi)


class Activation(NamedTuple):
    """A function as kernels take it: its code; a threshold (fatrelu) or limit (clamped_silu)."""

    code: int
    threshold: np.float32


def activation(name: str, threshold: float = 0.0) -> Activation:
    """The function named `name` in `ACTIVATION_CODES`. Errors: ValueError for an unknown name."""
    return Activation(activation_code(name), np.float32(threshold))


class Thresholds(NamedTuple):
    """Which neurons fire for a token.

    An up row is read where |fn(gate . x)| exceeds `gate`; a down row where, besides,
    |fn(gate . x) * up| times the norm of the down row exceeds `product`. Below zero: everywhere.
    """

    gate: np.float32
    product: np.float32


ALL_FIRE = Thresholds(np.float32(-1), np.float32(-1))


def not_zero(activation_fn: str) -> Thresholds:
    """Neurons whose activation is not zero: of the gate, with drelu of up too."""
    return Thresholds(np.float32(0), np.float32(0 if activation_fn == "drelu" else -1))


@njit(nogil=True, cache=True)
def passes(value, threshold):
    """Whether |value| exceeds `threshold`; a NaN does, so that it reaches the output."""
    return not abs(value) <= threshold


@njit(nogil=True, cache=True)
def activate(function, value):
    """fn of one number, gate . x; a NaN stays NaN.

    relu, drelu, fatrelu: 0 up to the threshold;  relu2: relu(v)^2;  silu: v / (1 + exp(-v))
    gelu: v Phi(v), exact by erf;  gelu_tanh: v / 2 (1 + tanh(sqrt(2 / pi) (v + 0.044715 v^3)))
    clamped_silu: g / (1 + exp(-1.702 g)), g = min(v, limit)
    """
    code = function.code
    if code in (RELU, FATRELU, DRELU):
        return np.float32(0) if value <= function.threshold else value
    if code == SILU:
        return np.float32(value / (1.0 + math.exp(-value)))
    if code == CLAMPED_SILU:
        g = function.threshold if value > function.threshold else value
        return np.float32(g / (1.0 + math.exp(-CLAMPED_SLOPE * g)))
    if code == GELU:
        return np.float32(0.5 * value * (1.0 + math.erf(value * _SQRT_HALF)))
    if code == GELU_TANH:
        inner = _TANH_SCALE * (value + 0.044715 * value * value * value)
        return np.float32(0.5 * value * (1.0 + math.tanh(inner)))
    return np.float32(0) if value <= 0 else value * value


@njit(nogil=True, cache=True)
def activate_up(function, value):
    """The factor up . x as it multiplies the gate.

    Itself; relu of it (drelu); clamped to -limit..limit, and 1 more (clamped_silu).
    """
    if function.code == CLAMPED_SILU:
        limit = function.threshold
        if value > limit:
            value = limit
        return (-limit if value < -limit else value) + np.float32(1)
    return np.float32(0) if function.code == DRELU and value <= 0 else value
