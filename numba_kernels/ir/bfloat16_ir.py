"""Dot products of bfloat16 pairs: AVX512-BF16's instruction."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from hotcold.numba_kernels.ir.float_ir import item_bytes, widen
from hotcold.numba_kernels.ir.pair_ir import LANES, TILE_ROWS, Ahead, PairInstruction, PairTile
from hotcold.numba_kernels.ir.vec import (
    BFLOAT,
    F32,
    I16,
    I32,
    Arguments,
    Ptr,
    Vec,
    codegen_of,
    for_vectors,
)

_FLOATS = ir.VectorType(F32, LANES)
_NARROW = ir.VectorType(BFLOAT, LANES)


def _add_products(sums: Vec, x: Vec, weights: Vec) -> Vec:
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return sums.call(name, _FLOATS, sums, x.view(BFLOAT), weights.view(BFLOAT))


BFLOAT16_PAIRS = PairInstruction(sums=F32, add=_add_products)


def _load_narrow(dtype: Any, at: Ptr, lanes: int) -> Vec:
    """Load LANES items, or 1: the nearest bfloat16, ties to even, as bits."""
    if dtype == types.int16:
        return at.load(I16, lanes)
    floats = widen(dtype, at, lanes)
    if lanes == 1:
        floats = Vec.full(at.builder, 0, F32, LANES).with_lane(0, floats)
    bits = floats.call("llvm.x86.avx512bf16.cvtneps2bf16.512", _NARROW, floats).view(I16)
    return bits if lanes > 1 else bits[0]


@intrinsic(prefer_literal=True)
def add_tile(
    typingctx, tokens, group, num_groups, weights, row, first, last, out, ahead, ahead_row, column,
    ahead_bytes,
):  # fmt: skip
    """out[row + r, group + g] += sum over pairs p of weights[row + r, p] . tokens[group + g, p].

    For r < TILE_ROWS and g < num_groups (a literal, up to MAX_GROUPS), pairs first..last-1 of
    `tokens`, which are 0.. of `weights`. Meanwhile ROWS_AHEAD rows of `ahead` are brought into the
    second-level cache from `column` on, `ahead_bytes` of each for each pair. Checks nothing.

    tokens (G, P, LANES), weights (rows, P) int32: two bfloat16 each; weights of any strides
    out (rows, G, LANES) float32, contiguous; ahead: any 2-D array
    """
    count = num_groups.literal_value
    index = types.int64
    signature = types.void(
        tokens, index, num_groups, weights, index, index, index, out, ahead, index, index, index
    )

    def emit(given: Arguments) -> None:
        x, w, target, following = (given.array(place) for place in (0, 3, 7, 8))
        group, row, first, last, ahead_row, column, ahead_bytes = given.numbers(
            1, 4, 5, 6, 9, 10, 11
        )
        tile = PairTile(
            BFLOAT16_PAIRS,
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
def narrow_row(typingctx, matrix, row, column, count, out):
    """out[:count] = matrix[row, column : column + count] as bfloat16.

    matrix (N, d) float32, uint16 (float16) or int16 (bfloat16), rows contiguous; out int16
    """

    def emit(given: Arguments) -> None:
        row, column, count = given.numbers(1, 2, 3)
        source, target = given.array(0).at(row, column), given.array(4).at()

        def convert(index: Vec, lanes: int) -> None:
            at = source + index * item_bytes(matrix.dtype)
            (target + index * 2).store(_load_narrow(matrix.dtype, at, lanes))

        for_vectors(count, LANES, convert)

    return types.void(matrix, types.int64, types.int64, types.int64, out), codegen_of(emit)


@intrinsic
def narrow_pair(typingctx, matrix, row, column, count, out):
    """out[i] = the pair of matrix[row, column + i] and matrix[row + 1, column + i], for i < count.

    matrix as in `narrow_row`; out int32
    """

    def emit(given: Arguments) -> None:
        row, column, count = given.numbers(1, 2, 3)
        rows, target = given.array(0).rows(row, column, 2), given.array(4).at()

        def convert(index: Vec, lanes: int) -> None:
            step = index * item_bytes(matrix.dtype)
            low, high = (
                _load_narrow(matrix.dtype, at + step, lanes).astype(I32, signed=False)
                for at in rows
            )
            (target + index * 4).store(low | high << 16)

        for_vectors(count, LANES, convert)

    return types.void(matrix, types.int64, types.int64, types.int64, out), codegen_of(emit)
