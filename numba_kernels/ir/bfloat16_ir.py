"""Vector IR for products of bfloat16 pairs: AVX512-BF16's dot product instruction."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from numba_kernels.ir.llvm_vectors import (
    FLOATS,
    I16,
    I32,
    I64,
    LANES,
    ZEROS,
    has_feature,
    item_pointer,
    new_cell,
    widen,
)
from numba_kernels.ir.pair_ir import (
    HALF_WORDS,
    ROWS_AHEAD,
    TILE_ROWS,
    WORDS,
    element,
    emit_row,
    further,
    multiply_pairs,
)


class _Bfloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


_PAIRS = ir.VectorType(_Bfloat(), 2 * LANES)


def has_pair_products() -> bool:
    """Whether the CPU that kernels are compiled for multiplies pairs of bfloat16."""
    return has_feature("avx512bf16")


def _load_narrow(builder: Any, dtype: Any, pointer: Any, lanes: int) -> Any:
    """Load LANES items, or 1, at `pointer` (i8*): the nearest bfloat16, ties to even, as bits."""
    kind = HALF_WORDS if lanes > 1 else I16
    if dtype == types.int16:
        return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=2, typ=kind)
    floats = widen(builder, dtype, pointer, lanes)
    if lanes == 1:
        floats = builder.insert_element(ZEROS, floats, I32(0))
    narrow = ir.VectorType(_Bfloat(), LANES)
    name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(narrow, [FLOATS]), name
    )
    bits = builder.bitcast(builder.call(function, [floats]), HALF_WORDS)
    return bits if lanes > 1 else builder.extract_element(bits, I32(0))


def _add_pair_products(builder: Any, total: Any, a: Any, b: Any) -> Any:
    kind = ir.FunctionType(FLOATS, [FLOATS, _PAIRS, _PAIRS])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [total, a, b])


@intrinsic(prefer_literal=True)
def add_tile(
    typingctx, tokens, group, num_groups, weights, row, first, last, out, ahead, ahead_row, column,
    ahead_bytes,
):  # fmt: skip
    """out[row + r, group + g] += sum over pairs p of weights[row + r, p] . tokens[group + g, p].

    For r < TILE_ROWS and g < num_groups (a literal, up to MOST_GROUPS), pairs first..last-1 of
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

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = I64(0)
        streams = [
            element(
                context, builder, tokens, args[0],
                [builder.add(args[1], I64(g)), args[5], zero],
            )[0]
            for g in range(count)
        ]  # fmt: skip
        corner, strides = element(context, builder, weights, args[3], [args[4], zero])
        rows = further(builder, corner, strides[0], range(TILE_ROWS))
        following = [
            element(context, builder, ahead, args[8], [builder.add(args[9], I64(r)), args[10]])[0]
            for r in range(ROWS_AHEAD)
        ]
        cells = [new_cell(builder, ZEROS) for _ in range(TILE_ROWS * count)]

        def add(total: Any, words: Any, weight: Any) -> Any:
            x, pair = builder.bitcast(words, _PAIRS), builder.bitcast(weight, _PAIRS)
            return _add_pair_products(builder, total, x, pair)

        num_pairs = builder.sub(args[6], args[5])
        multiply_pairs(
            builder, streams, rows, strides[1], zero, num_pairs, cells, add, following, args[11]
        )
        for r in range(TILE_ROWS):
            for g in range(count):
                target, _ = element(
                    context, builder, out, args[7],
                    [builder.add(args[4], I64(r)), builder.add(args[1], I64(g)), zero],
                )  # fmt: skip
                pointer = builder.bitcast(target, FLOATS.as_pointer())
                before = builder.load(pointer, align=64, typ=FLOATS)
                cell = builder.load(cells[r * count + g], typ=FLOATS)
                builder.store(builder.fadd(before, cell), pointer, align=64)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def narrow_row(typingctx, matrix, row, column, count, out):
    """out[:count] = matrix[row, column : column + count] as bfloat16.

    matrix (N, d) float32, uint16 (float16) or int16 (bfloat16), rows contiguous; out int16
    """
    signature = types.void(matrix, types.int64, types.int64, types.int64, out)
    dtype = matrix.dtype

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, _ = element(context, builder, matrix, args[0], [args[1], args[2]])
        target, _ = element(context, builder, out, args[4], [I64(0)])

        def convert(index: Any, lanes: int) -> None:
            at = item_pointer(builder, source, index, dtype.bitwidth // 8)
            bits = _load_narrow(builder, dtype, at, lanes)
            to = builder.bitcast(item_pointer(builder, target, index, 2), bits.type.as_pointer())
            builder.store(bits, to, align=2)

        emit_row(builder, args[3], convert)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def narrow_pair(typingctx, matrix, row, column, count, out):
    """out[i] = the pair of matrix[row, column + i] and matrix[row + 1, column + i], for i < count.

    matrix as in `narrow_row`; out int32
    """
    signature = types.void(matrix, types.int64, types.int64, types.int64, out)
    dtype = matrix.dtype

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, strides = element(context, builder, matrix, args[0], [args[1], args[2]])
        second = builder.gep(first, [strides[0]], source_etype=ir.IntType(8))
        target, _ = element(context, builder, out, args[4], [I64(0)])

        def convert(index: Any, lanes: int) -> None:
            kind = WORDS if lanes > 1 else I32
            low, high = (
                builder.zext(_load_narrow(builder, dtype, at, lanes), kind)
                for at in (
                    item_pointer(builder, row, index, dtype.bitwidth // 8)
                    for row in (first, second)
                )
            )
            sixteen = ir.Constant(kind, [I32(16)] * LANES) if lanes > 1 else I32(16)
            both = builder.or_(low, builder.shl(high, sixteen))
            to = builder.bitcast(item_pointer(builder, target, index, 4), kind.as_pointer())
            builder.store(both, to, align=4)

        emit_row(builder, args[3], convert)
        return context.get_dummy_value()

    return signature, codegen
