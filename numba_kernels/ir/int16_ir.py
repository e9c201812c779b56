"""Dot products of int16 pairs in groups of columns: AVX512-VNNI's vpdpwssd.

COLUMN_GROUP columns of a row share a scale, as in the quantized formats; their products add up
exactly in int32, because no number is larger than MAX_WEIGHT or MAX_INPUT.
"""

from __future__ import annotations

from functools import reduce

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from hotcold.numba_kernels.ir.float_ir import item_bytes, widen
from hotcold.numba_kernels.ir.lane_tile import TILE_ROWS, Ahead, Instruction, LaneTile
from hotcold.numba_kernels.ir.target import LANES
from hotcold.numba_kernels.ir.vec import (
    F32,
    I16,
    I32,
    Arguments,
    Vec,
    codegen_of,
    for_range,
)

COLUMN_GROUP = 64
GROUP_PAIRS = COLUMN_GROUP // 2
# 64 * 4095 * 8191 < 2 ** 31
MAX_WEIGHT = 4095
MAX_INPUT = 8191
# Added to a float of less than 2 ** 22 it leaves the nearest integer in the low bits of the sum.
_ROUNDS = 1.5 * 2**23
_MAGNITUDE = 0x7FFFFFFF

# For the instruction that stands by its name in code made here or kept from an earlier process:
# without it LLVM ends the process.
binding.initialize_native_asmparser()


def _add_products(sums: Vec, x: Vec, weights: Vec) -> Vec:
    """By its name: LLVM would make two slower instructions of its intrinsic function."""
    values = [sums.value, x.value, weights.value]
    kind = ir.FunctionType(sums.value.type, [value.type for value in values])
    text = "vpdpwssd $3, $2, $0"
    return Vec(sums.builder, sums.builder.asm(kind, text, "=v,0,v,v", values, side_effect=False))


INT16_PAIRS = Instruction(sums=I32, add=_add_products, items_a_step=4)


@intrinsic(prefer_literal=True)
def add_group_tile(
    typingctx, tokens, token_scales, group, num_groups, weights, scales, row, first, at, count,
    out, ahead, ahead_row, column,
):  # fmt: skip
    """out[row + r, group + g] += weights[row + r] . tokens[group + g] over groups of columns.

    For r < TILE_ROWS and g < num_groups (a literal, up to MAX_GROUPS); `count` groups, from group
    `first` of `tokens` and group `at` of `weights` on. Meanwhile ROWS_AHEAD rows of `ahead` are
    brought into the second-level cache from `column` on, 4 bytes for each pair. Checks nothing.

    tokens (G, P, LANES), weights (rows, P) int32: two int16 each
    token_scales (G, P / GROUP_PAIRS, LANES), scales (rows, P / GROUP_PAIRS) float32
    out (rows, G, LANES) float32, contiguous; ahead: any 2-D array
    """
    index = types.int64
    signature = types.void(
        tokens, token_scales, index, num_groups, weights, scales, index, index, index, index,
        out, ahead, index, index,
    )  # fmt: skip

    def emit(given: Arguments) -> None:
        x, x_scales, w, w_scales, target, following = (
            given.array(place) for place in (0, 1, 4, 5, 10, 11)
        )
        group, row, first, at, count, ahead_row, column = given.numbers(2, 6, 7, 8, 9, 12, 13)
        groups = [group + g for g in range(num_groups.literal_value)]
        tile = LaneTile(
            INT16_PAIRS,
            tokens=[x.at(g, first * GROUP_PAIRS) for g in groups],
            weights=w.rows(row, at * GROUP_PAIRS, TILE_ROWS),
            stride=w.strides[1],
            ahead=Ahead.of(following, ahead_row, column, 4),
        )
        token_steps = [x_scales.at(g, first) for g in groups]
        weight_steps = w_scales.rows(row, at, TILE_ROWS)
        targets = [[target.at(row + r, g) for g in groups] for r in range(TILE_ROWS)]

        def add_group(number: Vec) -> None:
            begin = number * GROUP_PAIRS
            sums = tile.sums(begin, begin + GROUP_PAIRS)
            of_tokens = [(step + number * (4 * LANES)).load(F32, LANES) for step in token_steps]
            for of_row, step, places in zip(sums, weight_steps, targets, strict=True):
                of_weights = (step + number * 4).load(F32)
                for total, scale, place in zip(of_row, of_tokens, places, strict=True):
                    before = place.load(F32, LANES, align=64)
                    after = total.astype(F32).fma(scale * of_weights, before)
                    place.store(after, align=64)

        for_range(0, count, 1, add_group)

    return signature, codegen_of(emit)


@intrinsic
def round_group(typingctx, matrix, row, column, most, out, out_row, position):
    """out[out_row, position + i] = matrix[row, column + i] / scale, rounded; i < COLUMN_GROUP.

    Returns the scale: the largest magnitude becomes `most`, or 0 where it is below 1e-34. Where
    something is not finite, the scale is not either.

    matrix (N, d) float32, uint16 (float16) or int16 (bfloat16), rows contiguous
    most float32; out (M, K) int16, rows contiguous; result float32
    """
    index = types.int64
    signature = types.float32(matrix, index, index, types.float32, out, index, index)
    dtype = matrix.dtype

    def emit(given: Arguments) -> Vec:
        row, column, most, out_row, position = given.numbers(1, 2, 3, 5, 6)
        source, target = given.array(0).at(row, column), given.array(4).at(out_row, position)
        begins = range(0, COLUMN_GROUP, LANES)
        parts = [widen(dtype, source + begin * item_bytes(dtype), LANES) for begin in begins]
        # As integers the bits of magnitudes are in order, and those of infinity and NaN on top.
        sizes = [part.view(I32) & _MAGNITUDE for part in parts]
        largest = reduce(lambda a, b: a.below(b).where(b, a), sizes)
        top = largest.call(f"llvm.vector.reduce.umax.v{LANES}i32", I32, largest).view(F32)
        factor = most / top
        for part, begin in zip(parts, begins, strict=True):
            (target + 2 * begin).store((part * factor + _ROUNDS).view(I32).astype(I16))
        return top / most

    return signature, codegen_of(emit)
