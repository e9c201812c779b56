"""Vector IR between floats and groups: vectors quantized group by group, rows widened again."""

from __future__ import annotations

from llvmlite import ir

from numba_kernels.formats import CHUNK, CHUNK_GROUPS, QUANT_GROUP
from numba_kernels.ir.float_ir import round_to_bfloat16
from numba_kernels.ir.quantized_ir import Chunk, Row, Vector, each_chunk, packed_steps
from numba_kernels.ir.target import LANES
from numba_kernels.ir.vec import F32, I8, I32, Ptr, Vec, for_range

_FLOATS = ir.VectorType(F32, LANES)
_QUARTER = 4  # lanes whose bytes fill a vector of 16


def emit_quantize(x: Ptr, into: Vector, groups: Vec) -> None:
    """Quantize a float32 vector of so many groups.

    scale = max |x| / 127 of the group, value = x / scale rounded to the nearest, ties to even. A
    NaN makes its group's scale NaN.
    """
    last_chunk = groups // CHUNK_GROUPS
    rest = groups - last_chunk * CHUNK_GROUPS

    def group(index: Vec) -> None:
        chunk = index // CHUNK_GROUPS
        lane = index - chunk * CHUNK_GROUPS
        lanes = chunk.equals(last_chunk).where(rest, LANES)
        first = x + index * (4 * QUANT_GROUP)
        halves = [(first + half * 4 * LANES).load(F32, LANES) for half in range(2)]
        scale, inverse = _scale(halves)
        base = into.values + chunk * CHUNK + lane * 4
        total = Vec.full(index.builder, 0, I32, LANES)
        for half, floats in enumerate(halves):
            scaled = floats * inverse
            values = scaled.call("llvm.rint.v16f32", _FLOATS, scaled).astype(I32)
            total = total + values
            fours = values.astype(I8).view(I32)
            for part in range(4):
                (base + lanes * (4 * (4 * half + part))).store(fours[part], align=1)
        (into.scales + index * 4).store(scale)
        (into.sums + index * 4).store(total.call("llvm.vector.reduce.add.v16i32", I32, total))

    for_range(0, groups, 1, group)


def _scale(halves: list[Vec]) -> tuple[Vec, Vec]:
    """A group's scale, and its inverse (0 for a group of zeros)."""
    a, b = (half.call("llvm.fabs.v16f32", _FLOATS, half) for half in halves)
    larger = a.call("llvm.maximum.v16f32", _FLOATS, a, b)
    largest = larger.call("llvm.vector.reduce.fmaximum.v16f32", F32, larger)
    inverse = largest.like(127) / largest
    return largest / 127, largest.equals(0).where(largest.like(0), inverse)


def emit_widened(bits: int, row: Row, groups: Vec, out: Ptr, to_bfloat16: bool) -> None:
    """out = the row's weights in their own order, as float32 or bfloat16 bits."""
    item_bytes = 2 if to_bfloat16 else 4

    def body(chunk: Chunk) -> None:
        scales = chunk.row_scales(row)
        target = chunk.at(out, CHUNK * item_bytes)
        for number in range(QUANT_GROUP * bits // 8 // 4):
            for part, packed in enumerate(packed_steps(chunk, bits, row, number)):
                place = 4 * number if bits == 8 else 8 * number + 4 * part
                for quarter in range(LANES // _QUARTER):
                    values = _quarter(bits, packed, scales, quarter)
                    if to_bfloat16:
                        values = round_to_bfloat16(values)
                    _store_quarter(chunk, values, quarter, target + place * item_bytes, item_bytes)

    each_chunk(groups, body)


def _quarter(bits: int, packed: Vec, scales: Vec, quarter: int) -> Vec:
    """The weights in the bytes of four lanes, as float32."""
    sixteen = packed.view(I8).take(range(LANES * quarter, LANES * (quarter + 1))).astype(I32)
    values = sixteen - 8 if bits == 4 else sixteen
    return values.astype(F32) * scales.take([_QUARTER * quarter + i // 4 for i in range(LANES)])


def _store_quarter(chunk: Chunk, values: Vec, quarter: int, target: Ptr, item_bytes: int) -> None:
    """Store each lane's four values; `target` is where those of the first group go."""
    for i in range(_QUARTER):
        lane = _QUARTER * quarter + i
        four = values.take(range(4 * i, 4 * i + 4))
        cell = target + lane * QUANT_GROUP * item_bytes
        if chunk.mask is None:
            cell.store(four)
            continue
        with values.builder.if_then(chunk.num_lanes.like(lane).below(chunk.num_lanes).value):
            cell.store(four)
