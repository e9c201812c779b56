"""Checks for NaN and infinity by bits, the fastest way on a CPU."""

import numpy as np

from hotcold.numba_kernels.compiler import njit

MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITE = np.int32(0x7F800000)  # infinities and NaN have all exponent bits set


@njit(nogil=True, cache=True)
def finite_row(row):
    """Whether all of row (d,) float32 is finite; checks nothing."""
    bits = row.view(np.int32)
    largest = np.int32(0)
    for i in range(bits.shape[0]):
        largest = max(largest, bits[i] & MAGNITUDE)
    return largest < INFINITE


@njit(nogil=True, cache=True)
def finite_rows(rows, num_rows):
    """Whether the first `num_rows` of rows (T, d) float32 are finite; checks nothing."""
    num_finite = 0
    for t in range(num_rows):
        num_finite += finite_row(rows[t])
    return num_finite == num_rows


@njit(nogil=True, cache=True)
def finite_pair(first, second, num_rows):
    """`finite_rows` of two arrays in one call: calls cost more than small rows."""
    return finite_rows(first, num_rows) and finite_rows(second, num_rows)
