"""Vector IR for products of int16 pairs in groups of columns: AVX512-VNNI's vpdpwssd.

COLUMN_GROUP columns of a row share a scale, as in the quantized formats; their products add up
exactly in int32, for no number is larger than MOST_WEIGHT or MOST_INPUT.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from numba_kernels.ir.llvm_vectors import (
    F32,
    FLOATS,
    I32,
    I64,
    LANES,
    counted_loop,
    fma,
    has_feature,
    item_pointer,
    new_cell,
    splat,
    widen,
)
from numba_kernels.ir.pair_ir import (
    HALF_WORDS,
    ROWS_AHEAD,
    TILE_ROWS,
    WORDS,
    element,
    further,
    multiply_pairs,
)

COLUMN_GROUP = 64
GROUP_PAIRS = COLUMN_GROUP // 2
# 64 * 4095 * 8191 < 2 ** 31
MOST_WEIGHT = 4095
MOST_INPUT = 8191
_NO_SUMS = ir.Constant(WORDS, [I32(0)] * LANES)
# Added to a float of less than 2 ** 22 it leaves the nearest integer in the low bits of the sum.
_ROUNDS = ir.Constant(FLOATS, [F32(1.5 * 2**23)] * LANES)

# For the instruction that stands by its name in code made here or kept from an earlier process:
# without it LLVM ends the process.
binding.initialize_native_asmparser()


def has_word_products() -> bool:
    """Whether the CPU that kernels are compiled for multiplies pairs of int16, 512 bits at once."""
    return has_feature("avx512vnni")


def _add_word_products(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """By its name, for LLVM would make two slower instructions of its intrinsic function."""
    kind = ir.FunctionType(WORDS, [WORDS] * 3)
    return builder.asm(kind, "vpdpwssd $3, $2, $0", "=v,0,v,v", [total, a, b], side_effect=False)


@intrinsic(prefer_literal=True)
def add_group_tile(
    typingctx, tokens, token_scales, group, num_groups, weights, scales, row, first, at, count,
    out, ahead, ahead_row, column,
):  # fmt: skip
    """out[row + r, group + g] += weights[row + r] . tokens[group + g] over groups of columns.

    For r < TILE_ROWS and g < num_groups (a literal, up to MOST_GROUPS); `count` groups, from group
    `first` of `tokens` and group `at` of `weights` on. Meanwhile ROWS_AHEAD rows of `ahead` are
    brought into the second-level cache from `column` on, 4 bytes for each pair. Checks nothing.

    tokens (G, P, LANES), weights (rows, P) int32: two int16 each
    token_scales (G, P / GROUP_PAIRS, LANES), scales (rows, P / GROUP_PAIRS) float32
    out (rows, G, LANES) float32, contiguous; ahead: any 2-D array
    """
    tile_groups = num_groups.literal_value
    index = types.int64
    signature = types.void(
        tokens, token_scales, index, num_groups, weights, scales, index, index, index, index,
        out, ahead, index, index,
    )  # fmt: skip

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = I64(0)
        groups = [builder.add(args[2], I64(g)) for g in range(tile_groups)]
        pair, weight_pair = (builder.mul(args[n], I64(GROUP_PAIRS)) for n in (7, 8))
        streams = [
            element(context, builder, tokens, args[0], [group, pair, zero])[0] for group in groups
        ]
        token_steps = [
            element(context, builder, token_scales, args[1], [group, args[7], zero])[0]
            for group in groups
        ]
        corner, strides = element(context, builder, weights, args[4], [args[6], weight_pair])
        rows = further(builder, corner, strides[0], range(TILE_ROWS))
        corner, scale_strides = element(context, builder, scales, args[5], [args[6], args[8]])
        row_steps = further(builder, corner, scale_strides[0], range(TILE_ROWS))
        following = [
            element(context, builder, ahead, args[11], [builder.add(args[12], I64(r)), args[13]])[0]
            for r in range(ROWS_AHEAD)
        ]
        targets = [
            element(context, builder, out, args[10], [builder.add(args[6], I64(r)), group, zero])[0]
            for r in range(TILE_ROWS)
            for group in groups
        ]
        cells = [new_cell(builder, _NO_SUMS) for _ in targets]

        def add(total: Any, x: Any, weight: Any) -> Any:
            return _add_word_products(builder, total, x, weight)

        def add_group(group: Any) -> None:
            for cell in cells:
                builder.store(_NO_SUMS, cell)
            begin = builder.mul(group, I64(GROUP_PAIRS))
            multiply_pairs(
                builder, streams, rows, strides[1], begin, builder.add(begin, I64(GROUP_PAIRS)),
                cells, add, following, I64(4),
            )  # fmt: skip
            xs = [
                widen(builder, types.float32, item_pointer(builder, step, group, 4 * LANES), LANES)
                for step in token_steps
            ]
            for r, step in enumerate(row_steps):
                scale = widen(builder, types.float32, item_pointer(builder, step, group, 4), 1)
                for g, x in enumerate(xs):
                    n = r * tile_groups + g
                    total = builder.sitofp(builder.load(cells[n], typ=WORDS), FLOATS)
                    target = builder.bitcast(targets[n], FLOATS.as_pointer())
                    before = builder.load(target, align=64, typ=FLOATS)
                    after = fma(builder, total, builder.fmul(x, splat(builder, scale)), before)
                    builder.store(after, target, align=64)

        counted_loop(builder, zero, args[9], 1, add_group)
        return context.get_dummy_value()

    return signature, codegen


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

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, _ = element(context, builder, matrix, args[0], [args[1], args[2]])
        target, _ = element(context, builder, out, args[4], [args[5], args[6]])
        floats = [
            widen(builder, dtype, item_pointer(builder, source, I64(i), dtype.bitwidth // 8), LANES)
            for i in range(0, COLUMN_GROUP, LANES)
        ]
        # As integers the bits of magnitudes are in order, and those of infinity and NaN on top.
        magnitude = ir.Constant(WORDS, [I32(0x7FFFFFFF)] * LANES)
        largest = None
        for part in floats:
            bits = builder.and_(builder.bitcast(part, WORDS), magnitude)
            if largest is not None:
                bits = builder.select(builder.icmp_unsigned(">", bits, largest), bits, largest)
            largest = bits
        kind = ir.FunctionType(I32, [WORDS])
        reduce = cgutils.get_or_insert_function(
            builder.module, kind, f"llvm.vector.reduce.umax.v{LANES}i32"
        )
        top = builder.bitcast(builder.call(reduce, [largest]), F32)
        factor = splat(builder, builder.fdiv(args[3], top))
        for part, begin in zip(floats, range(0, COLUMN_GROUP, LANES), strict=True):
            rounded = builder.fadd(builder.fmul(part, factor), _ROUNDS)
            words = builder.trunc(builder.bitcast(rounded, WORDS), HALF_WORDS)
            at = item_pointer(builder, target, I64(begin), 2)
            builder.store(words, builder.bitcast(at, HALF_WORDS.as_pointer()), align=2)
        return builder.fdiv(top, args[3])

    return signature, codegen
