"""Vector code that LLVM does not find by itself: dot products and scaled sums of weight rows.

Each intrinsic emits LLVM vector IR of 16 lanes; LLVM splits or joins the lanes for what the CPU
has (AVX-512, AVX2, NEON). float16 widens by `fpext`, bfloat16 by a 16-bit shift. Nothing here
checks its arguments. Rows must be contiguous; their distance (stride) is free, so a row of a
[N, 3, d] bundle array works as well as a row of a matrix.
"""

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from numba_kernels.llvm_vectors import (
    F32,
    I16,
    I32,
    I64,
    LANES,
    LINE_BYTES,
    LINES_AHEAD,
    PAGE_BYTES,
    counted_loop,
    fma,
    item_pointer,
    new_cell,
    prefetch_line,
    row_pointer,
    splat,
    sum_cells,
    vector_pointer,
    whole_steps,
    widen,
)


def _emit_dots(
    builder: Any, dtype: Any, rows: list[Any], xs: list[Any], length: Any, unroll: int, ahead: Any
) -> list[Any]:
    """Dot products of every weight row with every float32 vector, row by row; all in flight.

    `ahead`: a row that is read next, whose lines are prefetched in step with this one's, or None.
    """
    item_bytes = dtype.bitwidth // 8
    vector = ir.VectorType(F32, LANES)
    zeros = ir.Constant(vector, [F32(0)] * LANES)
    pairs = [(row, x) for row in rows for x in xs]
    sums = [[new_cell(builder, zeros) for _ in range(unroll)] for _ in pairs]
    tails = [new_cell(builder, F32(0)) for _ in pairs]

    def add(index: Any, lanes: int, cells: list[Any]) -> None:
        parts = [
            widen(builder, types.float32, item_pointer(builder, x, index, 4), lanes) for x in xs
        ]
        weights = [
            widen(builder, dtype, item_pointer(builder, row, index, item_bytes), lanes)
            for row in rows
        ]
        products = [(weight, part) for weight in weights for part in parts]
        for cell, (weight, part) in zip(cells, products, strict=True):
            total = builder.load(cell, typ=weight.type)
            builder.store(fma(builder, weight, part, total), cell)

    def vectors(index: Any, count: int) -> None:
        if ahead is not None:
            for line in range(0, count * LANES * item_bytes, LINE_BYTES):
                prefetch_line(builder, item_pointer(builder, ahead, index, item_bytes), line)
        for u in range(count):
            add(builder.add(index, I64(u * LANES)), LANES, [cells[u] for cells in sums])

    unrolled = whole_steps(builder, length, LANES * unroll)
    whole = whole_steps(builder, length, LANES)
    counted_loop(builder, I64(0), unrolled, LANES * unroll, lambda index: vectors(index, unroll))
    counted_loop(builder, unrolled, whole, LANES, lambda index: vectors(index, 1))
    counted_loop(builder, whole, length, 1, lambda index: add(index, 1, tails))
    return [
        builder.fadd(sum_cells(builder, cells), builder.load(tail, typ=F32))
        for cells, tail in zip(sums, tails, strict=True)
    ]


@intrinsic
def dot4(typingctx, weights, row0, row1, row2, row3, x):
    """(weights[row0] . x, ..., weights[row3] . x); weights (N, d), x (d,) float32."""
    signature = types.UniTuple(types.float32, 4)(
        weights, types.int64, types.int64, types.int64, types.int64, x
    )

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = [row_pointer(context, builder, weights, args[0], row) for row in args[1:5]]
        pointer, length = vector_pointer(context, builder, x, args[5])
        results = _emit_dots(builder, weights.dtype, rows, [pointer], length, 2, None)
        return context.make_tuple(builder, signature.return_type, results)

    return signature, codegen


@intrinsic
def dot1(typingctx, weights, row, x):
    """weights[row] . x; weights (N, d), x (d,) float32."""
    signature = types.float32(weights, types.int64, x)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = [row_pointer(context, builder, weights, args[0], args[1])]
        pointer, length = vector_pointer(context, builder, x, args[2])
        return _emit_dots(builder, weights.dtype, rows, [pointer], length, 8, None)[0]

    return signature, codegen


@intrinsic
def dot1_ahead(typingctx, weights, row, following, x):
    """`dot1`, while the lines of weights[following] are prefetched in step.

    One stream a core with the row after it on its way reads as fast as memory gives; four rows side
    by side reach 0.83 of that (docs/lab_log.md).
    """
    signature = types.float32(weights, types.int64, types.int64, x)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        this, after = (row_pointer(context, builder, weights, args[0], row) for row in args[1:3])
        pointer, length = vector_pointer(context, builder, x, args[3])
        return _emit_dots(builder, weights.dtype, [this], [pointer], length, 8, after)[0]

    return signature, codegen


@intrinsic
def dot_tile(typingctx, weights, row0, row1, row2, row3, x, first):
    """weights[row_r] . x[first + t] for 4 rows and 4 tokens, as 16 numbers, row by row.

    A row is widened once for four tokens and a token's vector loaded once for four rows, so that
    vectors which do not fit the first-level cache do not hold up the multiplication.
    """
    ids = (types.int64,) * 4
    signature = types.UniTuple(types.float32, 16)(weights, *ids, x, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = [row_pointer(context, builder, weights, args[0], row) for row in args[1:5]]
        tokens = [builder.add(args[6], I64(t)) for t in range(4)]
        vectors = [row_pointer(context, builder, x, args[5], t) for t in tokens]
        length = builder.extract_value(context.make_array(x)(context, builder, args[5]).shape, 1)
        results = _emit_dots(builder, weights.dtype, rows, vectors, length, 1, None)
        return context.make_tuple(builder, signature.return_type, results)

    return signature, codegen


def _emit_scaled_sum(
    builder: Any, dtype: Any, rows: list[Any], scales: list[Any], out: Any, length: Any
) -> None:
    item_bytes = dtype.bitwidth // 8
    wide = [splat(builder, scale) for scale in scales]
    whole = whole_steps(builder, length, LANES)

    def add(index: Any, lanes: int, factors: list[Any]) -> None:
        cell = item_pointer(builder, out, index, 4)
        total = widen(builder, types.float32, cell, lanes)
        for row, factor in zip(rows, factors, strict=True):
            weights = widen(builder, dtype, item_pointer(builder, row, index, item_bytes), lanes)
            total = fma(builder, weights, factor, total)
        builder.store(total, builder.bitcast(cell, total.type.as_pointer()), align=4)

    counted_loop(builder, I64(0), whole, LANES, lambda index: add(index, LANES, wide))
    counted_loop(builder, whole, length, 1, lambda index: add(index, 1, scales))


@intrinsic
def add_scaled4(typingctx, out, weights, row0, row1, row2, row3, c0, c1, c2, c3):
    """out += c0 * weights[row0] + ... + c3 * weights[row3]; out (d,) float32, weights (N, d)."""
    ids, scales = (types.int64,) * 4, (types.float32,) * 4
    signature = types.void(out, weights, *ids, *scales)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, length = vector_pointer(context, builder, out, args[0])
        rows = [row_pointer(context, builder, weights, args[1], row) for row in args[2:6]]
        _emit_scaled_sum(builder, weights.dtype, rows, list(args[6:10]), pointer, length)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def add_scaled1(typingctx, out, weights, row, scale):
    """out += scale * weights[row]; out (d,) float32, weights (N, d)."""
    signature = types.void(out, weights, types.int64, types.float32)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, length = vector_pointer(context, builder, out, args[0])
        rows = [row_pointer(context, builder, weights, args[1], args[2])]
        _emit_scaled_sum(builder, weights.dtype, rows, [args[3]], pointer, length)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def prefetch_row(typingctx, weights, row):
    """Ask for the first lines of each 4 KiB page of weights[row]: a jump there then costs less."""
    signature = types.void(weights, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        struct = context.make_array(weights)(context, builder, value=args[0])
        length = builder.extract_value(struct.shape, 1)
        row = row_pointer(context, builder, weights, args[0], args[1])
        num_bytes = builder.mul(length, I64(weights.dtype.bitwidth // 8))

        def page(index: Any) -> None:
            for line in range(LINES_AHEAD):
                prefetch_line(builder, item_pointer(builder, row, index, 1), line * LINE_BYTES)

        counted_loop(builder, I64(0), num_bytes, PAGE_BYTES, page)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def row_to_bfloat16(typingctx, weights, row, out):
    """out[:] = weights[row] rounded to the nearest bfloat16, ties to even; out (d,) int16."""
    signature = types.void(weights, types.int64, out)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row = row_pointer(context, builder, weights, args[0], args[1])
        pointer, length = vector_pointer(context, builder, out, args[2])

        def convert(index: Any, lanes: int) -> None:
            def whole(value: int) -> Any:
                return I32(value) if lanes == 1 else ir.Constant(
                    ir.VectorType(I32, lanes), [I32(value)] * lanes
                )  # fmt: skip

            at = item_pointer(builder, row, index, weights.dtype.bitwidth // 8)
            wide = widen(builder, weights.dtype, at, lanes)
            bits = builder.bitcast(wide, whole(0).type)
            odd = builder.and_(builder.lshr(bits, whole(16)), whole(1))
            rounded = builder.add(bits, builder.add(odd, whole(0x7FFF)))
            kind = ir.VectorType(I16, lanes) if lanes > 1 else I16
            narrow = builder.trunc(builder.lshr(rounded, whole(16)), kind)
            target = builder.bitcast(item_pointer(builder, pointer, index, 2), kind.as_pointer())
            builder.store(narrow, target, align=2)

        vectors = whole_steps(builder, length, LANES)
        counted_loop(builder, I64(0), vectors, LANES, lambda index: convert(index, LANES))
        counted_loop(builder, vectors, length, 1, lambda index: convert(index, 1))
        return context.get_dummy_value()

    return signature, codegen
