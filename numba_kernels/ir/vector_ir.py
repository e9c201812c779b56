"""Vector code that LLVM does not find by itself: dot products and scaled sums of weight rows.

Each intrinsic emits LLVM vector IR of 16 lanes; LLVM splits or joins the lanes for what the CPU
has (AVX-512, AVX2, NEON). float16 widens by `fpext`, bfloat16 by a 16-bit shift, quantized rows
multiply as integers. Nothing here checks its arguments. Rows must be contiguous; their distance
(stride) is free, so a row of a [N, 3, d] bundle array works as well as a row of a matrix.

A product of one row and one vector is added up in the same order by all of these, so its bits do
not depend on what is computed beside it. `x` is the result of
`numba_kernels.decode.vectors.quantize_activations`.
"""

from typing import Any

from numba import types
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic

from hotcold.numba_kernels.formats import QUANT_GROUP
from hotcold.numba_kernels.ir.float_ir import item_bytes, read_through, round_to_bfloat16, widen
from hotcold.numba_kernels.ir.operands import PART_COLUMNS, Vectors, Weights
from hotcold.numba_kernels.ir.quantize_ir import emit_quantize, emit_widened
from hotcold.numba_kernels.ir.quantized_ir import Vector, format_of
from hotcold.numba_kernels.ir.target import LANES, LINE_BYTES, LINES_AHEAD, PAGE_BYTES
from hotcold.numba_kernels.ir.vec import (
    Arguments,
    Ptr,
    Vec,
    codegen_of,
    for_range,
    for_vectors,
)

_INDEX = types.int64
_FACTOR = types.float32


@intrinsic
def any_layout(typingctx, array):
    """The same array as one of any strides: what takes it is compiled once for all layouts."""

    def emit(context, builder, signature, given):
        return impl_ret_borrowed(context, builder, signature.return_type, given[0])

    return array.copy(layout="A")(array), emit


def _indices(numbers: Any) -> Any:
    """A tuple of so many row numbers."""
    return types.UniTuple(_INDEX, len(numbers))


def _factors(numbers: Any) -> Any:
    """A tuple of so many factors."""
    return types.UniTuple(_FACTOR, len(numbers))


@intrinsic
def dot_rows(typingctx, weights, rows, x, token):
    """A tuple of weights[row] . x[token] for each of a tuple of rows."""

    def emit(given: Arguments) -> list[Vec]:
        matrix = Weights(given.array(0))
        operands = [matrix.row(row) for row in given.tuple_of(1)]
        return matrix.products(operands, [Vectors(given.arrays(2)).vector(given.number(3))])

    return _factors(rows)(weights, _indices(rows), x, _INDEX), codegen_of(emit)


@intrinsic
def dot_ahead(typingctx, weights, row, following, x, token):
    """weights[row] . x[token], while the lines of weights[following] are prefetched in step.

    For rows that do not follow each other in memory: the hardware prefetches those that do.
    """

    def emit(given: Arguments) -> Vec:
        matrix, vectors = Weights(given.array(0)), Vectors(given.arrays(3))
        row, following = (matrix.row(row) for row in given.numbers(1, 2))
        return matrix.products([row], [vectors.vector(given.number(4))], [following])[0]

    return types.float32(weights, _INDEX, _INDEX, x, _INDEX), codegen_of(emit)


@intrinsic
def dot_row(typingctx, weights, row, x, token):
    """weights[row] . x[token], of rows that are read one after the other.

    They are one stream a core, which the hardware prefetches; how much prefetch instructions add to
    that differs from CPU to CPU (`numba_kernels/ir/target.py`).
    """

    def emit(given: Arguments) -> Vec:
        matrix, vectors = Weights(given.array(0)), Vectors(given.arrays(2))
        row = matrix.row(given.number(1))
        return matrix.products_in_sequence(row, [vectors.vector(given.number(3))])[0]

    return types.float32(weights, _INDEX, x, _INDEX), codegen_of(emit)


@intrinsic
def dot_lone_row(typingctx, weights, row, x, token):
    """weights[row] . x[token], of a row that is read alone: nothing is prefetched."""

    def emit(given: Arguments) -> Vec:
        matrix, vectors = Weights(given.array(0)), Vectors(given.arrays(2))
        row = matrix.row(given.number(1))
        return matrix.products([row], [vectors.vector(given.number(3))])[0]

    return types.float32(weights, _INDEX, x, _INDEX), codegen_of(emit)


@intrinsic
def dot_tokens(typingctx, weights, row, x, tokens):
    """A tuple of weights[row] . x[token] for each of a tuple of tokens, as `dot_row`."""

    def emit(given: Arguments) -> list[Vec]:
        matrix, vectors = Weights(given.array(0)), Vectors(given.arrays(2))
        row, own = matrix.row(given.number(1)), given.tuple_of(3)
        return matrix.products_in_sequence(row, [vectors.vector(token) for token in own])

    return _factors(tokens)(weights, _INDEX, x, _indices(tokens)), codegen_of(emit)


@intrinsic
def read_rows(typingctx, weights, row, num_rows):
    """Bring rows row..row + num_rows - 1, which lie one after the other, into the cache."""

    def emit(given: Arguments) -> None:
        matrix, (first, num_rows) = Weights(given.array(0)), given.numbers(1, 2)
        read_through(matrix.array.at(first), matrix.row_bytes * num_rows)

    return types.void(weights, _INDEX, _INDEX), codegen_of(emit)


@intrinsic
def axpy(typingctx, out, weights, rows, factors):
    """out += the sum of factor * weights[row] over tuples, in their order; out (d,) float32.

    For quantized weights `out` is in lane order; see `numba_kernels.decode.rows.add_in_order`.
    """

    def emit(given: Arguments) -> None:
        matrix = Weights(given.array(1))
        own = [matrix.row(row) for row in given.tuple_of(2)]
        matrix.add_scaled(given.array(0).at(), own, given.tuple_of(3))

    return types.void(out, weights, _indices(rows), _factors(factors)), codegen_of(emit)


@intrinsic
def axpy_ahead(typingctx, out, weights, rows, factors, ahead):
    """`axpy`, while the rows of a tuple `ahead` are prefetched in step."""

    def emit(given: Arguments) -> None:
        matrix = Weights(given.array(1))
        own, following = ([matrix.row(row) for row in given.tuple_of(place)] for place in (2, 4))
        matrix.add_scaled(given.array(0).at(), own, given.tuple_of(3), following)

    signature = types.void(out, weights, _indices(rows), _factors(factors), _indices(ahead))
    return signature, codegen_of(emit)


@intrinsic
def add_part(typingctx, out, token, weights, rows, factors, part):
    """`axpy` of part `part` of the columns, which alone out (T, PART_COLUMNS) holds."""

    def emit(given: Arguments) -> None:
        matrix, target = Weights(given.array(2)), given.array(0).at(given.number(1))
        own = [matrix.row(row) for row in given.tuple_of(3)]
        matrix.add_part(target, own, given.tuple_of(4), given.number(5))

    signature = types.void(out, _INDEX, weights, _indices(rows), _factors(factors), _INDEX)
    return signature, codegen_of(emit)


@intrinsic
def prefetch_row(typingctx, weights, row):
    """Ask for the first lines of weights[row], and of each 4 KiB page in it.

    A jump there then costs less: the hardware's prefetcher starts early, and ends with a page.
    """

    def emit(given: Arguments) -> None:
        matrix = Weights(given.array(0))
        start = matrix.array.at(given.number(1))
        address = start.address()
        next_page = address.like(PAGE_BYTES) - (address & PAGE_BYTES - 1)

        def first_lines(index: Vec) -> None:
            for line in range(LINES_AHEAD):
                (start + index + line * LINE_BYTES).prefetch(2)

        first_lines(address.like(0))
        for_range(next_page, matrix.row_bytes, PAGE_BYTES, first_lines)

    return types.void(weights, _INDEX), codegen_of(emit)


@intrinsic
def prefetch_part(typingctx, weights, row, part):
    """Ask for all lines of weights[row] in part `part` of its columns."""

    def emit(given: Arguments) -> None:
        matrix, (row, part) = Weights(given.array(0)), given.numbers(1, 2)
        bits = matrix.format.bits if matrix.format else weights.dtype.bitwidth
        part_bytes = PART_COLUMNS * bits // 8
        start = part * part_bytes
        length = (matrix.row_bytes - start).minimum(part_bytes)
        at = matrix.array.at(row) + start
        for_range(0, length, LINE_BYTES, lambda index: (at + index).prefetch())

    return types.void(weights, _INDEX, _INDEX), codegen_of(emit)


@intrinsic
def quantize_vector(typingctx, weights, x, token, into, place):
    """into[place] = x[token] quantized for rows like `weights`; x (T, d) float32.

    into: QuantizedVectors
    """
    row_format = format_of(weights.dtype)
    assert row_format

    def emit(given: Arguments) -> None:
        source, (token, place) = given.array(1), given.numbers(2, 4)
        target = Vectors(given.arrays(3)).vector(place)
        assert isinstance(target, Vector)
        groups = source.shape[1] // QUANT_GROUP
        emit_quantize(source.at(token), target, groups, row_format)

    return types.void(weights, x, _INDEX, into, _INDEX), codegen_of(emit)


@intrinsic
def widen_row(typingctx, weights, row, out):
    """out[:] = weights[row], out (d,) int16 (nearest bfloat16, ties to even) or float32."""
    to_bfloat16 = out.dtype == types.int16

    def emit(given: Arguments) -> None:
        matrix, target = Weights(given.array(0)), given.array(2).at()
        row = matrix.row(given.number(1))
        if matrix.format:
            emit_widened(matrix.format, row, matrix.groups, target, to_bfloat16)
        else:
            _emit_float_row(weights.dtype, row, matrix.width, target, to_bfloat16)

    return types.void(weights, _INDEX, out), codegen_of(emit)


def _emit_float_row(dtype: Any, row: Ptr, length: Vec, out: Ptr, to_bfloat16: bool) -> None:
    def convert(index: Vec, lanes: int) -> None:
        values = widen(dtype, row + index * item_bytes(dtype), lanes)
        target = out + index * (2 if to_bfloat16 else 4)
        target.store(round_to_bfloat16(values) if to_bfloat16 else values)

    for_vectors(length, LANES, convert)
