"""Quantized activations, which quantized rows are multiplied with."""

import math
from typing import NamedTuple

import numpy as np
from numba.core import types
from numba.extending import overload
from numpy.typing import DTypeLike

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.formats import QUANT_GROUP
from hotcold.numba_kernels.ir.quantized_ir import format_of
from hotcold.numba_kernels.ir.target import LINE_BYTES
from hotcold.numba_kernels.ir.vector_ir import quantize_vector

NO_BIAS = np.empty(0, np.float32)


class QuantizedVectors(NamedTuple):
    """T vectors of up to d numbers: x = scale * value, a scale for each group of 32.

    values (T, d) int8, in the order of the rows' format (`numba_kernels.formats`), values for low
    nibbles before those for high ones; scales (T, d / 32) float32; sums (T, d / 32) int32: each
    group's sum of values. Arrays may have a leading axis of threads.
    """

    values: np.ndarray
    scales: np.ndarray
    sums: np.ndarray


def empty_vectors(num_threads: int, num_tokens: int, width: int) -> QuantizedVectors:
    """Work space for `num_tokens` vectors of up to `width` numbers in each thread."""
    groups = -(-width // QUANT_GROUP)
    shape = (num_threads, num_tokens, groups)
    return QuantizedVectors(
        values=aligned_zeros((num_threads, num_tokens, groups * QUANT_GROUP), np.int8),
        scales=aligned_zeros(shape, np.float32),
        sums=aligned_zeros(shape, np.int32),
    )


def aligned_zeros(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> np.ndarray:
    """Zeros that begin with a cache line, with a vector's length of padding behind them.

    NumPy's own begin 16 bytes into a line, so that each second vector of 32 bytes lies in two lines
    and each of 64 does. `numba_kernels.ir.half_ir` reads beyond the end.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    buffer = np.zeros(num_bytes + 2 * LINE_BYTES, np.uint8)
    start = -buffer.ctypes.data % LINE_BYTES
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)


@njit(nogil=True, cache=True)
def copy_numbers(x, out):
    """out[:] = x, which do not overlap: Numba's own asks whether they do, and may make a copy."""
    for i in range(out.shape[0]):
        out[i] = x[i]


def quantize_activations(weights, x, scratch, thread):  # type: ignore[no-untyped-def]
    """x (T, d) float32 as dot products with `weights` take it; for compiled code.

    x itself for float formats; for quantized ones `QuantizedVectors`, written to thread `thread`'s
    part of `scratch`.
    """
    raise NotImplementedError("quantize_activations() is for compiled code")


@overload(quantize_activations)
def _quantize_activations(weights, x, scratch, thread):  # type: ignore[no-untyped-def]
    if not format_of(weights.dtype):
        return lambda weights, x, scratch, thread: x
    assert isinstance(scratch, types.NamedTuple)

    def quantized(weights, x, scratch, thread):  # type: ignore[no-untyped-def]
        own = QuantizedVectors(scratch.values[thread], scratch.scales[thread], scratch.sums[thread])
        for t in range(x.shape[0]):
            quantize_vector(weights, x, t, own, t)
        return own

    return quantized
