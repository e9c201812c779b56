"""Vectors that quantized rows are multiplied with: quantized themselves, once for all rows."""

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

    values (T, d) int8, in the order of the quantized rows that they are for
    (`numba_kernels.formats`), what meets low nibbles before what meets high ones; scales
    (T, d / 32) float32; sums (T, d / 32) int32, the sum of each group's values. With a leading
    axis it is one such set for each thread.
    """

    values: np.ndarray
    scales: np.ndarray
    sums: np.ndarray


def empty_vectors(num_threads: int, num_tokens: int, width: int) -> QuantizedVectors:
    """Room for `num_tokens` vectors of up to `width` numbers in each thread."""
    groups = -(-width // QUANT_GROUP)
    shape = (num_threads, num_tokens, groups)
    return QuantizedVectors(
        values=_zeros((num_threads, num_tokens, groups * QUANT_GROUP), np.int8),
        scales=_zeros(shape, np.float32),
        sums=_zeros(shape, np.int32),
    )


def _zeros(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Zeros that begin with a line of the cache: loads of whole lines then take one line each.

    Behind them is room for as much as a vector of the CPU takes (`numba_kernels.ir.half_ir`).
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.zeros(num_bytes + 2 * LINE_BYTES, np.uint8)
    start = -room.ctypes.data % LINE_BYTES
    return room[start : start + num_bytes].view(dtype).reshape(shape)


@njit(nogil=True, cache=True)
def quantize_vectors(weights, x, into):
    """into[t] = x[t] quantized for rows like `weights`, for all tokens; no checks.

    x (T, d) float32, rows contiguous
    """
    for t in range(x.shape[0]):
        quantize_vector(weights, x, t, into)


def quantize_activations(weights, x, scratch, thread):  # type: ignore[no-untyped-def]
    """What products with `weights` take instead of x (T, d) float32: x itself for float formats.

    For quantized weights they are x's vectors quantized into thread `thread`'s part of `scratch`.
    For compiled code alone; see the overload below.
    """
    raise NotImplementedError("quantize_activations() is for compiled code")


@overload(quantize_activations)
def _quantize_activations(weights, x, scratch, thread):  # type: ignore[no-untyped-def]
    if not format_of(weights.dtype):
        return lambda weights, x, scratch, thread: x
    assert isinstance(scratch, types.NamedTuple)

    def quantized(weights, x, scratch, thread):  # type: ignore[no-untyped-def]
        own = QuantizedVectors(scratch.values[thread], scratch.scales[thread], scratch.sums[thread])
        quantize_vectors(weights, x, own)
        return own

    return quantized
