"""Panels of weights, in items of 32 bits: pairs of bfloat16 (AVX512-BF16's instruction) or float32.

How a panel is filled, of rows of any format, and multiplied. An array of items says by its dtype
what they are: int32 are pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hotcold.numba_kernels.formats import CHUNK, SCALE_BYTES
from hotcold.numba_kernels.ir.float_ir import item_bytes, widen
from hotcold.numba_kernels.ir.lane_tile import TILE_ROWS, Ahead, Instruction, LaneTile
from hotcold.numba_kernels.ir.operands import Weights
from hotcold.numba_kernels.ir.quantize_ir import emit_widened_chunk, lane_weights
from hotcold.numba_kernels.ir.quantized_ir import Chunk
from hotcold.numba_kernels.ir.target import LANES, LINE_BYTES
from hotcold.numba_kernels.ir.vec import (
    BFLOAT,
    F32,
    I16,
    I32,
    Arguments,
    Ptr,
    Vec,
    codegen_of,
    for_range,
    for_vectors,
    transposed,
)

_FLOATS = ir.VectorType(F32, LANES)
_NARROW = ir.VectorType(BFLOAT, LANES)
_INDEX = types.int64


def _add_pairs(sums: Vec, x: Vec, weights: Vec) -> Vec:
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return sums.call(name, _FLOATS, sums, x.view(BFLOAT), weights.view(BFLOAT))


def _add_floats(sums: Vec, x: Vec, weights: Vec) -> Vec:
    return x.view(F32).fma(weights.view(F32), sums)


_INSTRUCTIONS = {
    types.int32: Instruction(sums=F32, add=_add_pairs, items_a_step=4),
    types.float32: Instruction(sums=F32, add=_add_floats, items_a_step=2),
}


def _load_narrow(dtype: Any, at: Ptr, lanes: int) -> Vec:
    """Load LANES items, or 1: the nearest bfloat16, ties to even, as bits."""
    if dtype == types.int16:
        return at.load(I16, lanes)
    floats = widen(dtype, at, lanes)
    if lanes == 1:
        floats = Vec.full(at.builder, 0, F32, LANES).with_lane(0, floats)
    bits = _narrowed(floats)
    return bits if lanes > 1 else bits[0]


def _narrowed(floats: Vec) -> Vec:
    """The nearest bfloat16 of LANES numbers, as bits."""
    return floats.call("llvm.x86.avx512bf16.cvtneps2bf16.512", _NARROW, floats).view(I16)


@intrinsic(prefer_literal=True)
def add_tile(
    typingctx, tokens, group, num_groups, weights, row, first, last, out, ahead, ahead_row, column,
    ahead_bytes,
):  # fmt: skip
    """out[row + r, group + g] += sum over items i of weights[row + r, i] . tokens[group + g, i].

    For r < TILE_ROWS and g < num_groups (a literal, up to MAX_GROUPS), items first..last-1 of
    `tokens`, which are 0.. of `weights`. Meanwhile ROWS_AHEAD rows of `ahead` are brought into the
    second-level cache from `column` on, `ahead_bytes` of each for each item. Checks nothing.

    tokens (G, P, LANES), weights (rows, P) int32 or float32; weights of any strides
    out (rows, G, LANES) float32, contiguous; ahead: any 2-D array
    """
    count = num_groups.literal_value
    instruction = _INSTRUCTIONS[tokens.dtype]
    signature = types.void(
        tokens, _INDEX, num_groups, weights, _INDEX, _INDEX, _INDEX, out, ahead, *(_INDEX,) * 3
    )

    def emit(given: Arguments) -> None:
        x, w, target, following = (given.array(place) for place in (0, 3, 7, 8))
        group, row, first, last, ahead_row, column, ahead_bytes = given.numbers(
            1, 4, 5, 6, 9, 10, 11
        )
        tile = LaneTile(
            instruction,
            tokens=[x.at(group + g, first) for g in range(count)],
            weights=w.rows(row, 0, TILE_ROWS),
            stride=w.strides[1],
            ahead=Ahead.of(following, ahead_row, column, ahead_bytes),
        )
        for r, of_row in enumerate(tile.sums(first - first, last - first)):
            for g, total in enumerate(of_row):
                place = target.at(row + r, group + g)
                place.store(place.load(F32, LANES, align=64) + total, align=64)

    return signature, codegen_of(emit)


@intrinsic
def transpose(typingctx, matrix, row):
    """Swap matrix[row + i, k] and matrix[row + k, i] for i, k < LANES.

    matrix (N, LANES) of 32 bits, rows contiguous
    """

    def emit(given: Arguments) -> None:
        places = given.array(0).rows(given.number(1), 0, LANES)
        rows = [place.load(I32, LANES) for place in places]
        for place, values in zip(places, transposed(rows), strict=True):
            place.store(values)

    return types.void(matrix, _INDEX), codegen_of(emit)


@intrinsic
def fill_row(typingctx, matrix, row, column, count, out):
    """out[:count] = matrix[row, column : column + count], as float32 or, of int16, as bfloat16.

    matrix (N, d) float32, uint16 (float16) or int16 (bfloat16), rows contiguous
    """
    is_narrow = out.dtype == types.int16

    def emit(given: Arguments) -> None:
        row, column, count = given.numbers(1, 2, 3)
        source, target = given.array(0).at(row, column), given.array(4).at()

        def convert(index: Vec, lanes: int) -> None:
            at = source + index * item_bytes(matrix.dtype)
            values = (_load_narrow if is_narrow else widen)(matrix.dtype, at, lanes)
            (target + index * (2 if is_narrow else 4)).store(values)

        for_vectors(count, LANES, convert)

    return types.void(matrix, _INDEX, _INDEX, _INDEX, out), codegen_of(emit)


def _fill_groups(num_rows: int) -> Callable[..., Any]:
    """`fill_groups` of rows that make a pair, or of one alone."""

    def fill(typingctx, matrix, row, column, count, out, item):  # type: ignore[no-untyped-def]
        def emit(given: Arguments) -> None:
            row, column, count, item = given.numbers(1, 2, 3, 5)
            rows = given.array(0).rows(row, column, num_rows)
            block = given.array(4)
            target, stride = block.at(0, item), block.strides[0]

            def convert(index: Vec, lanes: int) -> None:
                step = index * item_bytes(matrix.dtype)
                if out.dtype == types.float32:
                    values = widen(matrix.dtype, rows[0] + step, lanes)
                else:
                    values = _paired([_load_narrow(matrix.dtype, at + step, lanes) for at in rows])
                group = index // LANES
                (target + stride * group + (index - group * LANES) * 4).store(values)

            for_vectors(count, LANES, convert)

        signature = types.void(matrix, _INDEX, _INDEX, _INDEX, out, _INDEX)
        return signature, codegen_of(emit)

    return fill


def _paired(halves: list[Vec]) -> Vec:
    """One or two numbers of 16 bits in each item of 32."""
    low, *high = (half.astype(I32, signed=False) for half in halves)
    return low | high[0] << 16 if high else low


# fill_groups(matrix, row, column, count, out, item): out[i // LANES, item, i % LANES] = the item of
# matrix[row, column + i], for i < count; of int32 items, fill_pairs makes pairs with the next row.
# matrix as in `fill_row`; out (G, items, LANES) int32 or float32
fill_groups, fill_pairs = (intrinsic(_fill_groups(number)) for number in (1, 2))


def _unpack_groups(num_rows: int) -> Callable[..., Any]:
    """`unpack_groups` of rows that make a pair, or of one alone."""

    def unpack(typingctx, weights, row, chunk, out, item):  # type: ignore[no-untyped-def]
        def emit(given: Arguments) -> None:
            matrix, block = Weights(given.array(0)), given.array(3)
            row, chunk, item = given.numbers(1, 2, 4)
            assert matrix.format
            whole = Chunk(chunk, matrix.groups.like(LANES), None)
            target, stride = block.at(0, item), block.strides[0]
            rows = [
                lane_weights(matrix.format, matrix.row(row + r), whole) for r in range(num_rows)
            ]
            for found in zip(*rows, strict=True):
                place, values = found[0][0], [weights for _, weights in found]
                if out.dtype == types.float32:
                    (target + stride * place).store(values[0], align=64)
                else:
                    (target + stride * place).store(_paired(list(map(_narrowed, values))), align=64)

        return types.void(weights, _INDEX, _INDEX, out, _INDEX), codegen_of(emit)

    return unpack


# unpack_groups(weights, row, chunk, out, item): out[i, item, g] = the item of weight i in group g
# of a whole chunk of weights[row]; of int32 items, unpack_pairs makes pairs with the next row.
# weights (N, row bytes) of formats whose rows are summed; out (32, items, LANES) int32 or float32
unpack_groups, unpack_pairs = (intrinsic(_unpack_groups(number)) for number in (1, 2))


@intrinsic
def prefetch_columns(typingctx, matrix, row, column, count):
    """Ask for the lines of matrix[row, column : column + count], of quantized rows for a chunk."""

    def emit(given: Arguments) -> None:
        weights, (row, column, count) = Weights(given.array(0)), given.numbers(1, 2, 3)
        if not weights.format:
            at = weights.array.at(row, column)
            length = count * item_bytes(matrix.dtype)
        else:
            chunk = column // CHUNK
            own = weights.row(row)
            at = own.values + chunk * weights.format.chunk_bytes
            length = chunk.like(weights.format.chunk_bytes)
            (own.first + chunk * (SCALE_BYTES * LANES)).prefetch(locality=2)
        for_range(0, length, LINE_BYTES, lambda index: (at + index).prefetch(locality=2))

    return types.void(matrix, _INDEX, _INDEX, _INDEX), codegen_of(emit)


@intrinsic
def unpack_chunk(typingctx, weights, row, chunk, out):
    """out[:] = the weights in chunk `chunk` of a quantized row, as float32 or, of int16, bfloat16.

    weights (N, row bytes) of ROW_FORMATS; out (CHUNK,), of which a last chunk may fill less
    """
    to_bfloat16 = out.dtype == types.int16

    def emit(given: Arguments) -> None:
        matrix, (row, chunk) = Weights(given.array(0)), given.numbers(1, 2)
        assert matrix.format
        target = given.array(3).at()
        emit_widened_chunk(
            matrix.format, matrix.row(row), matrix.groups, chunk, target, to_bfloat16
        )

    return types.void(weights, _INDEX, _INDEX, out), codegen_of(emit)
