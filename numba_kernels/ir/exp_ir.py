"""2 to the power of float32 numbers, lane by lane: the same bits in any lane, on every CPU."""

from __future__ import annotations

from hotcold.numba_kernels.ir.vec import F32, I32, Vec

LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * LOG2_E)
_ROUNDS = 12582912.0  # 1.5 * 2 ** 23: a sum with it is rounded to a whole number, in its last bits
_LEAST, _MOST = -126.0, 127.0  # exponents of ordinary numbers
# 2 ** f = 1 + f * polynomial for -0.5 <= f <= 0.5, with a relative error of 1.6e-8
_POLYNOMIAL = (
    0.00015353361959569156,
    0.0013398873852565885,
    0.00961843691766262,
    0.055503323674201965,
    0.24022647738456726,
    0.6931471824645996,
)


def _split(x: Vec) -> tuple[Vec, Vec, Vec]:
    """p, f and q with 2 ** x = p * (1 + f * q), of x up to 127; p is a power of two."""
    limited = (x.like(_MOST) < x).where(x.like(_MOST), x)
    shifted = limited + _ROUNDS
    fraction = limited - (shifted - _ROUNDS)
    rest = x.like(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        rest = rest.fma(fraction, x.like(coefficient))
    return ((shifted.view(I32) << 23) + 0x3F800000).view(F32), fraction, rest


def exp2(x: Vec) -> Vec:
    """2 ** x of float32 numbers, within two units in the last place; exactly 1 of 0.

    0 where x is below -126, -infinity too; 2 ** 127 where x is above 127. NaN stays NaN.
    """
    power, fraction, rest = _split(x)
    return (x < _LEAST).where(x.like(0), rest.fma(fraction, x.like(1)) * power)


def tanh_of_exponent(z: Vec) -> Vec:
    """tanh(x) for z = 2 * LOG2_E * x, with a relative error of some 2 ** -22. NaN stays NaN.

    It is (2 ** z - 1) / (2 ** z + 1), where the difference loses nothing near 0.
    """
    power, fraction, rest = _split(z)
    above_one = (fraction * rest).fma(power, power - 1.0)
    less = (z < _LEAST).where(z.like(-1), above_one)
    return less / (less + 2.0)
