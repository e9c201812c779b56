"""Vector code that LLVM does not find by itself: dot products and scaled sums of weight rows.

Each intrinsic emits LLVM vector IR of 16 lanes; LLVM splits or joins the lanes for what the CPU
has (AVX-512, AVX2, NEON). float16 widens by `fpext`, bfloat16 by a 16-bit shift. Nothing here
checks its arguments. Rows must be contiguous; their distance (stride) is free, so a row of a
[N, 3, d] bundle array works as well as a row of a matrix.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16
_PAGE_BYTES = 4096
_LINE_BYTES = 64
_LINES_AHEAD = 4  # the first lines of a page wake the TLB and the hardware's stream prefetcher

_f32 = ir.FloatType()
_half = ir.HalfType()
_i16 = ir.IntType(16)
_i32 = ir.IntType(32)
_i64 = ir.IntType(64)
_i8p = ir.IntType(8).as_pointer()


def _widen(builder: Any, dtype: Any, pointer: Any, lanes: int) -> Any:
    """Load `lanes` weights at `pointer` (i8*) and return them as float (a scalar for one lane)."""

    def shaped(element: Any) -> Any:
        return ir.VectorType(element, lanes) if lanes > 1 else element

    def load(element: Any, align: int) -> Any:
        return builder.load(
            builder.bitcast(pointer, shaped(element).as_pointer()), align=align, typ=shaped(element)
        )

    if dtype == types.float32:
        return load(_f32, 4)
    if dtype == types.uint16:
        return builder.fpext(load(_half, 2), shaped(_f32))
    if dtype == types.int16:
        wide = builder.zext(load(_i16, 2), shaped(_i32))
        sixteen = _i32(16) if lanes == 1 else ir.Constant(shaped(_i32), [_i32(16)] * lanes)
        return builder.bitcast(builder.shl(wide, sixteen), shaped(_f32))
    raise TypeError(f"weights must be float32, uint16 (float16) or int16 (bfloat16), not {dtype}")


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    name = "llvm.fma.f32" if a.type == _f32 else f"llvm.fma.v{LANES}f32"
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(a.type, [a.type] * 3), name
    )
    return builder.call(function, [a, b, c])


def _splat(builder: Any, scalar: Any) -> Any:
    vector = ir.VectorType(_f32, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _i32(0))
    mask = ir.Constant(ir.VectorType(_i32, LANES), [_i32(0)] * LANES)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)


def _sum_lanes(builder: Any, vector: Any) -> Any:
    """Sum by halving, so that the order of additions is the same on every CPU."""
    width = LANES
    while width > 1:
        half = width // 2
        kind = ir.VectorType(_i32, half)
        low = builder.shuffle_vector(
            vector, vector, ir.Constant(kind, [_i32(i) for i in range(half)])
        )
        high = builder.shuffle_vector(
            vector, vector, ir.Constant(kind, [_i32(half + i) for i in range(half)])
        )
        vector = builder.fadd(low, high)
        width = half
    return builder.extract_element(vector, _i32(0))


def _offset(builder: Any, pointer: Any, index: Any, item_bytes: int) -> Any:
    step = builder.mul(index, _i64(item_bytes))
    return builder.gep(builder.bitcast(pointer, _i8p), [step], source_etype=ir.IntType(8))


def _row(context: Any, builder: Any, array_type: Any, array: Any, row: Any) -> Any:
    """i8* of row `row` of a 2-D array."""
    struct = context.make_array(array_type)(context, builder, value=array)
    stride = builder.extract_value(struct.strides, 0)
    base = builder.bitcast(struct.data, _i8p)
    return builder.gep(base, [builder.mul(row, stride)], source_etype=ir.IntType(8))


def _data(context: Any, builder: Any, array_type: Any, array: Any) -> tuple[Any, Any]:
    """i8* of a 1-D contiguous array's data, and its length."""
    struct = context.make_array(array_type)(context, builder, value=array)
    return builder.bitcast(struct.data, _i8p), builder.extract_value(struct.shape, 0)


def _loop(builder: Any, start: Any, stop: Any, step: int, body: Callable[[Any], None]) -> None:
    with cgutils.for_range_slice(builder, start, stop, _i64(step), inc=True) as (index, _):
        body(index)


def _emit_dots(
    builder: Any, dtype: Any, rows: list[Any], xs: list[Any], length: Any, unroll: int, ahead: Any
) -> list[Any]:
    """Dot products of every weight row with every float32 vector, row by row; all in flight.

    `ahead`: a row that is read next, whose lines are prefetched in step with this one's, or None.
    """
    item_bytes = dtype.bitwidth // 8
    vector = ir.VectorType(_f32, LANES)
    zeros = ir.Constant(vector, [_f32(0)] * LANES)
    pairs = [(row, x) for row in rows for x in xs]
    sums = [[_new_cell(builder, zeros) for _ in range(unroll)] for _ in pairs]
    tails = [_new_cell(builder, _f32(0)) for _ in pairs]

    def add(index: Any, lanes: int, cells: list[Any]) -> None:
        parts = [_widen(builder, types.float32, _offset(builder, x, index, 4), lanes) for x in xs]
        weights = [
            _widen(builder, dtype, _offset(builder, row, index, item_bytes), lanes) for row in rows
        ]
        products = [(weight, part) for weight in weights for part in parts]
        for cell, (weight, part) in zip(cells, products, strict=True):
            total = builder.load(cell, typ=weight.type)
            builder.store(_fma(builder, weight, part, total), cell)

    def vectors(index: Any, count: int) -> None:
        if ahead is not None:
            for line in range(0, count * LANES * item_bytes, _LINE_BYTES):
                _prefetch(builder, _offset(builder, ahead, index, item_bytes), line)
        for u in range(count):
            add(builder.add(index, _i64(u * LANES)), LANES, [cells[u] for cells in sums])

    unrolled = _whole(builder, length, LANES * unroll)
    whole = _whole(builder, length, LANES)
    _loop(builder, _i64(0), unrolled, LANES * unroll, lambda index: vectors(index, unroll))
    _loop(builder, unrolled, whole, LANES, lambda index: vectors(index, 1))
    _loop(builder, whole, length, 1, lambda index: add(index, 1, tails))
    return [
        builder.fadd(_sum_cells(builder, cells), builder.load(tail, typ=_f32))
        for cells, tail in zip(sums, tails, strict=True)
    ]


def _new_cell(builder: Any, value: Any) -> Any:
    """A stack cell that holds `value`; LLVM turns it into a register."""
    cell = cgutils.alloca_once(builder, value.type)
    builder.store(value, cell)
    return cell


def _whole(builder: Any, length: Any, step: int) -> Any:
    return builder.mul(builder.udiv(length, _i64(step)), _i64(step))


def _sum_cells(builder: Any, cells: list[Any]) -> Any:
    vector = ir.VectorType(_f32, LANES)
    total = builder.load(cells[0], typ=vector)
    for cell in cells[1:]:
        total = builder.fadd(total, builder.load(cell, typ=vector))
    return _sum_lanes(builder, total)


def _prefetch(builder: Any, pointer: Any, offset_bytes: int) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_i8p, _i32, _i32, _i32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    at = builder.gep(pointer, [_i64(offset_bytes)], source_etype=ir.IntType(8))
    builder.call(function, [at, _i32(0), _i32(3), _i32(1)])  # for reading, into all caches, data


@intrinsic
def dot4(typingctx, weights, row0, row1, row2, row3, x):
    """(weights[row0] . x, ..., weights[row3] . x); weights (N, d), x (d,) float32."""
    signature = types.UniTuple(types.float32, 4)(
        weights, types.int64, types.int64, types.int64, types.int64, x
    )

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = [_row(context, builder, weights, args[0], row) for row in args[1:5]]
        pointer, length = _data(context, builder, x, args[5])
        results = _emit_dots(builder, weights.dtype, rows, [pointer], length, 2, None)
        return context.make_tuple(builder, signature.return_type, results)

    return signature, codegen


@intrinsic
def dot1(typingctx, weights, row, x):
    """weights[row] . x; weights (N, d), x (d,) float32."""
    signature = types.float32(weights, types.int64, x)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = [_row(context, builder, weights, args[0], args[1])]
        pointer, length = _data(context, builder, x, args[2])
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
        this, after = (_row(context, builder, weights, args[0], row) for row in args[1:3])
        pointer, length = _data(context, builder, x, args[3])
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
        rows = [_row(context, builder, weights, args[0], row) for row in args[1:5]]
        tokens = [builder.add(args[6], _i64(t)) for t in range(4)]
        vectors = [_row(context, builder, x, args[5], t) for t in tokens]
        length = builder.extract_value(context.make_array(x)(context, builder, args[5]).shape, 1)
        results = _emit_dots(builder, weights.dtype, rows, vectors, length, 1, None)
        return context.make_tuple(builder, signature.return_type, results)

    return signature, codegen


def _emit_scaled_sum(
    builder: Any, dtype: Any, rows: list[Any], scales: list[Any], out: Any, length: Any
) -> None:
    item_bytes = dtype.bitwidth // 8
    wide = [_splat(builder, scale) for scale in scales]
    whole = _whole(builder, length, LANES)

    def add(index: Any, lanes: int, factors: list[Any]) -> None:
        cell = _offset(builder, out, index, 4)
        total = _widen(builder, types.float32, cell, lanes)
        for row, factor in zip(rows, factors, strict=True):
            weights = _widen(builder, dtype, _offset(builder, row, index, item_bytes), lanes)
            total = _fma(builder, weights, factor, total)
        builder.store(total, builder.bitcast(cell, total.type.as_pointer()), align=4)

    _loop(builder, _i64(0), whole, LANES, lambda index: add(index, LANES, wide))
    _loop(builder, whole, length, 1, lambda index: add(index, 1, scales))


@intrinsic
def add_scaled4(typingctx, out, weights, row0, row1, row2, row3, c0, c1, c2, c3):
    """out += c0 * weights[row0] + ... + c3 * weights[row3]; out (d,) float32, weights (N, d)."""
    ids, scales = (types.int64,) * 4, (types.float32,) * 4
    signature = types.void(out, weights, *ids, *scales)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, length = _data(context, builder, out, args[0])
        rows = [_row(context, builder, weights, args[1], row) for row in args[2:6]]
        _emit_scaled_sum(builder, weights.dtype, rows, list(args[6:10]), pointer, length)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def add_scaled1(typingctx, out, weights, row, scale):
    """out += scale * weights[row]; out (d,) float32, weights (N, d)."""
    signature = types.void(out, weights, types.int64, types.float32)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, length = _data(context, builder, out, args[0])
        rows = [_row(context, builder, weights, args[1], args[2])]
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
        row = _row(context, builder, weights, args[0], args[1])
        num_bytes = builder.mul(length, _i64(weights.dtype.bitwidth // 8))

        def page(index: Any) -> None:
            for line in range(_LINES_AHEAD):
                _prefetch(builder, _offset(builder, row, index, 1), line * _LINE_BYTES)

        _loop(builder, _i64(0), num_bytes, _PAGE_BYTES, page)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def row_to_bfloat16(typingctx, weights, row, out):
    """out[:] = weights[row] rounded to the nearest bfloat16, ties to even; out (d,) int16."""
    signature = types.void(weights, types.int64, out)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row = _row(context, builder, weights, args[0], args[1])
        pointer, length = _data(context, builder, out, args[2])

        def convert(index: Any, lanes: int) -> None:
            def whole(value: int) -> Any:
                return _i32(value) if lanes == 1 else ir.Constant(
                    ir.VectorType(_i32, lanes), [_i32(value)] * lanes
                )  # fmt: skip

            at = _offset(builder, row, index, weights.dtype.bitwidth // 8)
            wide = _widen(builder, weights.dtype, at, lanes)
            bits = builder.bitcast(wide, whole(0).type)
            odd = builder.and_(builder.lshr(bits, whole(16)), whole(1))
            rounded = builder.add(bits, builder.add(odd, whole(0x7FFF)))
            kind = ir.VectorType(_i16, lanes) if lanes > 1 else _i16
            narrow = builder.trunc(builder.lshr(rounded, whole(16)), kind)
            target = builder.bitcast(_offset(builder, pointer, index, 2), kind.as_pointer())
            builder.store(narrow, target, align=2)

        vectors = _whole(builder, length, LANES)
        _loop(builder, _i64(0), vectors, LANES, lambda index: convert(index, LANES))
        _loop(builder, vectors, length, 1, lambda index: convert(index, 1))
        return context.get_dummy_value()

    return signature, codegen
