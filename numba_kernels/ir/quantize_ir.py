"""Vector IR between floats and groups: vectors quantized group by group, rows widened again."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from numba_kernels.formats import CHUNK, CHUNK_GROUPS, QUANT_GROUP
from numba_kernels.ir.llvm_vectors import (
    F32,
    I8,
    I32,
    I64,
    LANES,
    counted_loop,
    item_pointer,
    round_to_bfloat16,
    splat,
    widen_floats,
)
from numba_kernels.ir.quantized_ir import FLOATS, INTS, Chunk, Row, Vector, each_chunk, packed_steps

_QUARTER = 4  # lanes whose bytes fill a vector of 16


def emit_quantize(builder: Any, x: Any, into: Vector, groups: Any) -> None:
    """Quantize a float32 vector (i8*) of so many groups.

    scale = max |x| / 127 of the group, value = x / scale rounded to the nearest, ties to even. A
    NaN makes its group's scale NaN.
    """
    last_chunk = builder.udiv(groups, I64(CHUNK_GROUPS))
    rest = builder.sub(groups, builder.mul(last_chunk, I64(CHUNK_GROUPS)))

    def group(index: Any) -> None:
        chunk = builder.udiv(index, I64(CHUNK_GROUPS))
        lane = builder.sub(index, builder.mul(chunk, I64(CHUNK_GROUPS)))
        lanes = builder.select(builder.icmp_signed("==", chunk, last_chunk), rest, I64(LANES))
        halves = [
            widen_floats(
                builder, item_pointer(builder, x, index, 4 * QUANT_GROUP), half * 4 * LANES
            )
            for half in range(2)
        ]
        scale, inverse = _scale(builder, halves)
        base = item_pointer(builder, item_pointer(builder, into.values, chunk, CHUNK), lane, 4)
        total = ir.Constant(INTS, None)
        for half, floats in enumerate(halves):
            nearest = _call(builder, "llvm.rint.v16f32", FLOATS, builder.fmul(floats, inverse))
            values = builder.fptosi(nearest, INTS)
            total = builder.add(total, values)
            bytes_ = builder.trunc(values, ir.VectorType(I8, LANES))
            fours = builder.bitcast(bytes_, ir.VectorType(I32, 4))
            for part in range(4):
                target = item_pointer(builder, base, lanes, 4 * (4 * half + part))
                four = builder.extract_element(fours, I32(part))
                builder.store(four, builder.bitcast(target, I32.as_pointer()), align=1)
        _store(builder, scale, item_pointer(builder, into.scales, index, 4))
        sum_ = _call(builder, "llvm.vector.reduce.add.v16i32", I32, total)
        _store(builder, sum_, item_pointer(builder, into.sums, index, 4))

    counted_loop(builder, I64(0), groups, 1, group)


def _scale(builder: Any, halves: list[Any]) -> tuple[Any, Any]:
    """A group's scale, and a vector of its inverse (zeros for a group of zeros)."""
    sizes = [_call(builder, "llvm.fabs.v16f32", FLOATS, half) for half in halves]
    larger = _call(builder, "llvm.maximum.v16f32", FLOATS, *sizes)
    largest = _call(builder, "llvm.vector.reduce.fmaximum.v16f32", F32, larger)
    scale = builder.fdiv(largest, F32(127))
    inverse = builder.fdiv(F32(127), largest)
    is_zero = builder.fcmp_ordered("==", largest, F32(0))
    return scale, splat(builder, builder.select(is_zero, F32(0), inverse))


def _call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    signature = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=4)


def emit_widened(
    builder: Any, bits: int, row: Row, groups: Any, out: Any, to_bfloat16: bool
) -> None:
    """out = the row's weights in their own order, as float32 or bfloat16 bits; `out` is i8*."""
    item_bytes = 2 if to_bfloat16 else 4

    def body(chunk: Chunk) -> None:
        scales = chunk.row_scales(row)
        target = chunk.at(out, CHUNK * item_bytes)
        for number in range(QUANT_GROUP * bits // 8 // 4):
            for part, packed in enumerate(packed_steps(chunk, bits, row, number)):
                place = 4 * number if bits == 8 else 8 * number + 4 * part
                for quarter in range(LANES // _QUARTER):
                    weights = _quarter(builder, bits, packed, scales, quarter)
                    values = round_to_bfloat16(builder, weights) if to_bfloat16 else weights
                    _store_quarter(chunk, values, quarter, target, place, item_bytes)

    each_chunk(builder, groups, body)


def _quarter(builder: Any, bits: int, packed: Any, scales: Any, quarter: int) -> Any:
    """The weights in the bytes of four lanes, as float32."""
    bytes_ = builder.bitcast(packed, ir.VectorType(I8, 4 * LANES))
    kind = ir.VectorType(I32, LANES)
    places = [I32(LANES * quarter + i) for i in range(LANES)]
    sixteen = builder.shuffle_vector(bytes_, bytes_, ir.Constant(kind, places))
    groups = [I32(_QUARTER * quarter + i // 4) for i in range(LANES)]
    wide_scales = builder.shuffle_vector(scales, scales, ir.Constant(kind, groups))
    values = builder.sext(sixteen, INTS)
    if bits == 4:
        values = builder.sub(values, ir.Constant(INTS, [I32(8)] * LANES))
    return builder.fmul(builder.sitofp(values, FLOATS), wide_scales)


def _store_quarter(
    chunk: Chunk, values: Any, quarter: int, target: Any, place: int, item_bytes: int
) -> None:
    """Store each lane's four values at `place` of its group."""
    builder = chunk.builder
    kind = ir.VectorType(values.type.element, 4)
    for i in range(_QUARTER):
        lane = _QUARTER * quarter + i
        indices = ir.Constant(ir.VectorType(I32, 4), [I32(4 * i + k) for k in range(4)])
        four = builder.shuffle_vector(values, values, indices)
        cell = item_pointer(builder, target, I64(lane * QUANT_GROUP + place), item_bytes)
        typed = builder.bitcast(cell, kind.as_pointer())
        if chunk.mask is None:
            builder.store(four, typed, align=item_bytes)
            continue
        with builder.if_then(builder.icmp_unsigned("<", I64(lane), chunk.num_lanes)):
            builder.store(four, typed, align=item_bytes)
