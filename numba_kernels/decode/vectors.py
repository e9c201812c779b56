"""Activations as rows are multiplied with them: quantized, or floats in places of their own."""

import math
from typing import NamedTuple

import numpy as np
from numba import types
from numpy.typing import DTypeLike

from hotcold.numba_kernels.compiler import by_types, inlined_by_types, njit
from hotcold.numba_kernels.formats import QUANT_GROUP, RowFormat
from hotcold.numba_kernels.ir.codes import codes_of
from hotcold.numba_kernels.ir.quantized_ir import format_of
from hotcold.numba_kernels.ir.target import LINE_BYTES, has_feature
from hotcold.numba_kernels.ir.vector_ir import quantize_vector

NO_BIAS = np.empty(0, np.float32)
# Of `ActivationSpace.floats`, in numbers. A row is an odd number of units: vectors of 4096 numbers
# side by side would lie in the same few sets of the first-level cache. The first one begins with a
# line, as AVX2's halves of lines have to; with AVX-512 16 bytes later, which is no slower, and for
# two to four tokens faster (docs/decisions.md).
_UNIT = 4 * LINE_BYTES // 4
_BEGIN = 4 if has_feature("avx512f") else 0


class QuantizedVectors(NamedTuple):
    """T vectors of up to d numbers: x = scale * value, a scale for each group of 32.

    values (T, d) int8, in the order of the rows' format (`numba_kernels.formats`), values for low
    nibbles before those for high ones; scales (T, d / 32) float32; sums (T, d / 32) int32: each
    group's sum of values. Arrays may have a leading axis of threads.
    """

    values: np.ndarray
    scales: np.ndarray
    sums: np.ndarray


class BothOrders(NamedTuple):
    """The same vectors for rows of either order of values, where matrices beside each other differ.

    fours: for rows whose steps of four bytes meet four neighbours, eights: those whose low and high
    nibbles meet eight
    """

    fours: QuantizedVectors
    eights: QuantizedVectors


def takes_eights(row_format: RowFormat | None) -> bool | None:
    """Whether rows of the format take `BothOrders.eights`; None of floats, whose format is None."""
    return None if row_format is None else codes_of(row_format).each == 8


class ActivationSpace(NamedTuple):
    """Work space of `quantize_activations` for T vectors of up to d numbers, for each thread.

    values, scales, sums: of `QuantizedVectors`, eights: values in the other of `BothOrders`; floats
    (threads, T, at least d) float32
    """

    values: np.ndarray
    scales: np.ndarray
    sums: np.ndarray
    eights: np.ndarray
    floats: np.ndarray


def activation_space(num_threads: int, num_tokens: int, width: int) -> ActivationSpace:
    """Work space for `num_tokens` vectors of up to `width` numbers in each thread."""
    shape = (num_threads, num_tokens, (-(-width // _UNIT) | 1) * _UNIT)
    floats = aligned_zeros((_BEGIN + math.prod(shape),))[_BEGIN:].reshape(shape)
    vectors = empty_vectors(num_threads, num_tokens, width)
    return ActivationSpace(*vectors, aligned_zeros(vectors.values.shape, np.int8), floats)


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

    NumPy's own begin 16 bytes into a line, so that each second vector of 32 bytes lies in two
    lines. `numba_kernels.ir.half_ir` reads beyond the end.
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


@by_types
def quantize_activations(weights, x, scratch, thread):  # type: ignore[no-untyped-def]
    """x (T, d) float32 as dot products with `weights` take it; for compiled code.

    Written to thread `thread`'s part of `scratch`, an `ActivationSpace`: for quantized formats
    `QuantizedVectors`, for float ones the numbers as they are. One token's are x itself.
    """
    if not format_of(weights.dtype):
        return _place_floats
    assert isinstance(scratch, types.NamedTuple)

    def quantized(weights, x, scratch, thread):  # type: ignore[no-untyped-def]
        own = QuantizedVectors(scratch.values[thread], scratch.scales[thread], scratch.sums[thread])
        for t in range(x.shape[0]):
            quantize_vector(weights, x, t, own, t)
        return own

    return quantized


def _place_floats(weights, x, scratch, thread):  # type: ignore[no-untyped-def]
    num_tokens, width = x.shape
    if num_tokens == 1:
        return x
    own = scratch.floats[thread, :num_tokens]
    for t in range(num_tokens):
        copy_numbers(x[t], own[t, :width])
    return own


@inlined_by_types
def in_order_of(weights, vectors):  # type: ignore[no-untyped-def]
    """Those of `BothOrders` that rows of `weights` take, or `vectors`; for compiled code."""
    if getattr(vectors, "instance_class", None) is not BothOrders:
        return lambda weights, vectors: vectors
    if takes_eights(format_of(weights.dtype)):
        return lambda weights, vectors: vectors.eights
    return lambda weights, vectors: vectors.fours


@by_types
def quantize_for_all(arrays, x, scratch, thread):  # type: ignore[no-untyped-def]
    """`quantize_activations` for rows of `BlockRows.arrays`; for compiled code.

    `BothOrders` where there are rows of both.
    """
    orders = [takes_eights(format_of(each.dtype)) for each in arrays]
    if len(set(orders)) == 1:
        return lambda arrays, x, scratch, thread: quantize_activations(
            arrays[0], x, scratch, thread
        )
    eight, four = orders.index(True), orders.index(False)

    def both(arrays, x, scratch, thread):  # type: ignore[no-untyped-def]
        scales, sums = scratch.scales[thread], scratch.sums[thread]
        eights = QuantizedVectors(scratch.eights[thread], scales, sums)
        for t in range(x.shape[0]):
            quantize_vector(arrays[eight], x, t, eights, t)
        return BothOrders(quantize_activations(arrays[four], x, scratch, thread), eights)

    return both
