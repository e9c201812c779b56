"""Pieces of LLVM vector IR that the intrinsics of this package are built from.

All take llvmlite's builder first. Pointers are i8*, indices and lengths i64.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target

LANES = 16
PAGE_BYTES = 4096
LINE_BYTES = 64
LINES_AHEAD = 4  # the first lines of a page wake the TLB and the hardware's stream prefetcher

F32 = ir.FloatType()
HALF = ir.HalfType()
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
FLOATS = ir.VectorType(F32, LANES)
ZEROS = ir.Constant(FLOATS, [F32(0)] * LANES)
BYTES = ir.IntType(8).as_pointer()


def has_feature(name: str) -> bool:
    """Whether the CPU that kernels are compiled for has a feature, such as "avx512f".

    It is this machine's, or what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say.
    """
    features = cpu_target.target_context.codegen()._tm_features  # no public name for it
    return f"+{name}" in features.split(",")


def widen(builder: Any, dtype: Any, pointer: Any, lanes: int) -> Any:
    """Load `lanes` weights at `pointer` (i8*) and return them as float (a scalar for one lane)."""

    def shaped(element: Any) -> Any:
        return ir.VectorType(element, lanes) if lanes > 1 else element

    def load(element: Any, align: int) -> Any:
        return builder.load(
            builder.bitcast(pointer, shaped(element).as_pointer()), align=align, typ=shaped(element)
        )

    if dtype == types.float32:
        return load(F32, 4)
    if dtype == types.uint16:
        return builder.fpext(load(HALF, 2), shaped(F32))
    if dtype == types.int16:
        wide = builder.zext(load(I16, 2), shaped(I32))
        sixteen = I32(16) if lanes == 1 else ir.Constant(shaped(I32), [I32(16)] * lanes)
        return builder.bitcast(builder.shl(wide, sixteen), shaped(F32))
    if dtype == types.int8:
        return builder.sitofp(load(I8, 1), shaped(F32))
    raise TypeError(
        f"weights must be float32, uint16 (float16), int16 (bfloat16) or int8, not {dtype}"
    )


def round_to_bfloat16(builder: Any, floats: Any) -> Any:
    """The nearest bfloat16, ties to even, as bits (i16); scalars or vectors. NaN stays NaN."""
    lanes = floats.type.count if isinstance(floats.type, ir.VectorType) else 0

    def kind(element: Any) -> Any:
        return ir.VectorType(element, lanes) if lanes else element

    def whole(value: int) -> Any:
        return ir.Constant(kind(I32), [I32(value)] * lanes) if lanes else I32(value)

    bits = builder.bitcast(floats, kind(I32))
    odd = builder.and_(builder.lshr(bits, whole(16)), whole(1))
    rounded = builder.add(bits, builder.add(odd, whole(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", floats, floats)
    rounded = builder.select(is_nan, builder.or_(bits, whole(0x400000)), rounded)
    return builder.trunc(builder.lshr(rounded, whole(16)), kind(I16))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once; scalars or vectors."""
    name = "llvm.fma.f32" if a.type == F32 else f"llvm.fma.v{LANES}f32"
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(a.type, [a.type] * 3), name
    )
    return builder.call(function, [a, b, c])


def splat(builder: Any, scalar: Any) -> Any:
    """Return a vector with `scalar` in every lane."""
    vector = ir.VectorType(F32, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
    mask = ir.Constant(ir.VectorType(I32, LANES), [I32(0)] * LANES)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)


def sum_lanes(builder: Any, vector: Any) -> Any:
    """Sum by halving, so that the order of additions is the same on every CPU."""
    width = LANES
    while width > 1:
        half = width // 2
        kind = ir.VectorType(I32, half)
        low = builder.shuffle_vector(
            vector, vector, ir.Constant(kind, [I32(i) for i in range(half)])
        )
        high = builder.shuffle_vector(
            vector, vector, ir.Constant(kind, [I32(half + i) for i in range(half)])
        )
        vector = builder.fadd(low, high)
        width = half
    return builder.extract_element(vector, I32(0))


def item_pointer(builder: Any, pointer: Any, index: Any, item_bytes: int) -> Any:
    """Return the address of item `index` of items of `item_bytes` from `pointer` on."""
    step = builder.mul(index, I64(item_bytes))
    return builder.gep(builder.bitcast(pointer, BYTES), [step], source_etype=ir.IntType(8))


def row_pointer(context: Any, builder: Any, array_type: Any, array: Any, row: Any) -> Any:
    """i8* of row `row` of a 2-D array."""
    struct = context.make_array(array_type)(context, builder, value=array)
    stride = builder.extract_value(struct.strides, 0)
    base = builder.bitcast(struct.data, BYTES)
    return builder.gep(base, [builder.mul(row, stride)], source_etype=ir.IntType(8))


def vector_pointer(context: Any, builder: Any, array_type: Any, array: Any) -> tuple[Any, Any]:
    """i8* of a 1-D contiguous array's data, and its length."""
    struct = context.make_array(array_type)(context, builder, value=array)
    return builder.bitcast(struct.data, BYTES), builder.extract_value(struct.shape, 0)


def counted_loop(
    builder: Any, start: Any, stop: Any, step: int, body: Callable[[Any], None]
) -> None:
    """Emit `for index in range(start, stop, step): body(index)`; whole steps only."""
    with cgutils.for_range_slice(builder, start, stop, I64(step), inc=True) as (index, _):
        body(index)


def new_cell(builder: Any, value: Any) -> Any:
    """A stack cell that holds `value`; LLVM turns it into a register."""
    cell = cgutils.alloca_once(builder, value.type)
    builder.store(value, cell)
    return cell


def whole_steps(builder: Any, length: Any, step: int) -> Any:
    """Return the largest multiple of `step` that is not above `length`."""
    return builder.mul(builder.udiv(length, I64(step)), I64(step))


def add_products(
    builder: Any, dtype: Any, rows: list[Any], xs: list[Any], index: Any, lanes: int, cells: Any
) -> None:
    """cells[r * len(xs) + t] += rows[r] * xs[t] at `index`; rows of `dtype`, xs float32 (i8*)."""
    item_bytes = dtype.bitwidth // 8
    parts = [widen(builder, types.float32, item_pointer(builder, x, index, 4), lanes) for x in xs]
    weights = [
        widen(builder, dtype, item_pointer(builder, row, index, item_bytes), lanes) for row in rows
    ]
    products = [(weight, part) for weight in weights for part in parts]
    for cell, (weight, part) in zip(cells, products, strict=True):
        total = builder.load(cell, typ=weight.type)
        builder.store(fma(builder, weight, part, total), cell)


def sum_cells(builder: Any, cells: list[Any]) -> Any:
    """Return the sum of all lanes of the vectors in `cells`."""
    vector = ir.VectorType(F32, LANES)
    total = builder.load(cells[0], typ=vector)
    for cell in cells[1:]:
        total = builder.fadd(total, builder.load(cell, typ=vector))
    return sum_lanes(builder, total)


def prefetch_line(builder: Any, pointer: Any, offset_bytes: int, locality: int = 3) -> None:
    """Ask for the line at `pointer` + `offset_bytes`, for reading.

    `locality` 3 is into all caches, 2 into all but the first level.
    """
    kind = ir.FunctionType(ir.VoidType(), [BYTES, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    at = builder.gep(pointer, [I64(offset_bytes)], source_etype=ir.IntType(8))
    builder.call(function, [at, I32(0), I32(locality), I32(1)])
