"""Smooth activation functions of rows, by vectors: a number has the same bits in any column."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from hotcold.numba_kernels.checks import CLAMPED_SLOPE
from hotcold.numba_kernels.ir.exp_ir import LOG2_E, exp2, tanh_of_exponent
from hotcold.numba_kernels.ir.target import LANES
from hotcold.numba_kernels.ir.vec import F32, Arguments, Vec, codegen_of, for_vectors

_TANH_SCALE = 0.7978845608028654  # sqrt(2 / pi)
# erfc(z) = (a1 t + ... + a5 t^5) exp(-z^2), t = 1 / (1 + p z), z >= 0, within 1.5e-7:
# Abramowitz and Stegun, 7.1.26
_ERFC = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
_ERFC_P = 0.3275911
_SQRT_HALF = 0.7071067811865476


def _silu(v: Vec) -> Vec:
    return v / (exp2(v * -LOG2_E) + 1)


def _clamped_silu(v: Vec, limit: Vec) -> Vec:
    """g / (1 + exp(-1.702 g)), g = min(v, limit); NaN stays NaN."""
    top = limit.spread(v.lanes) if v.lanes > 1 else limit
    g = (top < v).where(top, v)
    return g / (exp2(g * (-CLAMPED_SLOPE * LOG2_E)) + 1)


def _gelu_tanh(v: Vec) -> Vec:
    """(1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))."""
    inner = (v * v * v).fma(v.like(0.044715), v)
    return v / (exp2(inner * (-2 * _TANH_SCALE * LOG2_E)) + 1)


def _gelu(v: Vec) -> Vec:
    """Phi(-|v|) = erfc(|v| / sqrt(2)) / 2, and Phi(|v|) = 1 - Phi(-|v|)."""
    is_negative = v < 0
    size = is_negative.where(-v, v)
    t = v.like(1) / (size * (_ERFC_P * _SQRT_HALF) + 1)
    sum_ = v.like(_ERFC[0])
    for coefficient in _ERFC[1:]:
        sum_ = sum_.fma(t, v.like(coefficient))
    below = sum_ * t * exp2(size * size * (-0.5 * LOG2_E)) * 0.5
    return v * is_negative.where(below, v.like(1) - below)


def _change_row(given: Arguments, function: Callable[[Vec], Vec]) -> None:
    array = given.array(0)
    first = array.at(given.number(1))

    def one(index: Vec, lanes: int) -> None:
        place = first + index * 4
        place.store(function(place.load(F32, lanes)))

    for_vectors(array.shape[1], LANES, one)


def _of_rows(function: Callable[[Vec], Vec]) -> Any:
    """An intrinsic: rows[row] = fn of each of its numbers; rows (T, N) float32, contiguous."""

    @intrinsic
    def of_row(typingctx, rows, row):
        def emit(given: Arguments) -> None:
            _change_row(given, function)

        return types.void(rows, types.int64), codegen_of(emit)

    return of_row


@intrinsic
def clamped_silu_row(typingctx, rows, row, limit):
    """rows[row] = g / (1 + exp(-1.702 g)), g = min(v, limit), of each of its numbers v."""

    def emit(given: Arguments) -> None:
        _change_row(given, lambda v: _clamped_silu(v, given.number(2)))

    return types.void(rows, types.int64, types.float32), codegen_of(emit)


@intrinsic
def softcap_row(typingctx, rows, row, cap):
    """rows[row] = cap tanh(v / cap), of each of its numbers v."""

    def emit(given: Arguments) -> None:
        def capped(v: Vec) -> Vec:
            own = given.number(2)
            own = own.spread(v.lanes) if v.lanes > 1 else own
            return own * tanh_of_exponent(v / own * (2 * LOG2_E))

        _change_row(given, capped)

    return types.void(rows, types.int64, types.float32), codegen_of(emit)


silu_row = _of_rows(_silu)
gelu_row = _of_rows(_gelu)
gelu_tanh_row = _of_rows(_gelu_tanh)
