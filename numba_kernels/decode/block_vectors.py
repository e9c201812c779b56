"""Vectors that the matrix of a block is multiplied with: its own for each of its tokens.

Those of all chosen blocks lie together in one row of numbers, a block's `count` vectors of `width`
numbers from `begin` on; quantized, where the matrix is, in the same places of `QuantizedVectors`.
"""

from hotcold.numba_kernels.compiler import inlined_by_types, njit
from hotcold.numba_kernels.decode.vectors import QuantizedVectors
from hotcold.numba_kernels.formats import QUANT_GROUP
from hotcold.numba_kernels.ir.quantized_ir import format_of
from hotcold.numba_kernels.ir.vector_ir import quantize_vector


@njit(nogil=True, cache=True)
def part_of_row(numbers, begin, count, width):
    """numbers[begin:] as (count, width)."""
    return numbers[begin : begin + count * width].reshape(count, width)


@inlined_by_types
def block_vectors(weights, numbers, begin, count, width, inputs, thread):  # type: ignore[no-untyped-def]
    """The vectors as products with `weights` take them, once `quantize_block` has written them.

    For compiled code.
    """
    if not format_of(weights.dtype):
        return lambda weights, numbers, begin, count, width, inputs, thread: part_of_row(
            numbers, begin, count, width
        )

    def quantized(weights, numbers, begin, count, width, inputs, thread):  # type: ignore[no-untyped-def]
        values, scales, sums = inputs.values[thread], inputs.scales[thread], inputs.sums[thread]
        first, groups = begin // QUANT_GROUP, width // QUANT_GROUP
        return QuantizedVectors(
            part_of_row(values.reshape(values.size), begin, count, width),
            part_of_row(scales.reshape(scales.size), first, count, groups),
            part_of_row(sums.reshape(sums.size), first, count, groups),
        )

    return quantized


@inlined_by_types
def _quantize(weights, source, vectors):  # type: ignore[no-untyped-def]
    """Write `vectors` of source (m, N), where rows like `weights` need them; for compiled code."""
    if not format_of(weights.dtype):
        return lambda weights, source, vectors: None

    def quantize(weights, source, vectors):  # type: ignore[no-untyped-def]
        for row in range(source.shape[0]):
            quantize_vector(weights, source, row, vectors, row)

    return quantize


@njit(nogil=True, cache=True)
def quantize_block(weights, numbers, begin, count, width, inputs, thread):
    """Write the vectors for the matrix to the thread's part of `inputs`."""
    vectors = block_vectors(weights, numbers, begin, count, width, inputs, thread)
    _quantize(weights, part_of_row(numbers, begin, count, width), vectors)
