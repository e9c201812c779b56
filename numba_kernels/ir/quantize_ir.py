"""Vector IR between floats and groups: vectors quantized, rows widened again, alone or in sums."""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir

from hotcold.numba_kernels.formats import CHUNK, CHUNK_GROUPS, QUANT_GROUP, RowFormat
from hotcold.numba_kernels.ir.codes import Codes, codes_of, summed_codes
from hotcold.numba_kernels.ir.factors import factors_of
from hotcold.numba_kernels.ir.float_ir import round_to_bfloat16
from hotcold.numba_kernels.ir.quantized_ir import (
    Chunk,
    Rest,
    Row,
    Vector,
    each_chunk,
    one_chunk,
    row_bytes,
    with_chunks,
)
from hotcold.numba_kernels.ir.target import LANES, LINE_BYTES
from hotcold.numba_kernels.ir.vec import F32, I8, I32, Ptr, Vec, for_range

_FLOATS = ir.VectorType(F32, LANES)
_QUARTER = 4  # lanes whose bytes fill a vector of 16


def emit_quantize(x: Ptr, into: Vector, groups: Vec, row_format: RowFormat) -> None:
    """Quantize a float32 vector of so many groups, for rows of a format.

    scale = max |x| / 127 of the group, value = x / scale rounded to the nearest, ties to even. A
    NaN makes its group's scale NaN. The steps of a chunk that meet low nibbles stand before those
    that meet high ones.
    """
    nibbles = codes_of(row_format).each // 4
    step_places = [step // nibbles + step % nibbles * (8 // nibbles) for step in range(8)]
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
                place = step_places[4 * half + part]
                (base + lanes * (4 * place)).store(fours[part], align=1)
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


def emit_widened(row_format: RowFormat, row: Row, groups: Vec, out: Ptr, to_bfloat16: bool) -> None:
    """out = the row's weights in their own order, as float32 or bfloat16 bits."""
    each_chunk(groups, lambda chunk: _emit_widened(row_format, row, chunk, out, to_bfloat16))


def emit_widened_chunk(
    row_format: RowFormat, row: Row, groups: Vec, index: Vec, out: Ptr, to_bfloat16: bool
) -> None:
    """`emit_widened` of one chunk, which alone `out` holds."""
    whole_out = out + index * (-CHUNK * (2 if to_bfloat16 else 4))
    one_chunk(
        groups, index, lambda chunk: _emit_widened(row_format, row, chunk, whole_out, to_bfloat16)
    )


def _emit_widened(
    row_format: RowFormat, row: Row, chunk: Chunk, out: Ptr, to_bfloat16: bool
) -> None:
    codes, item_bytes = codes_of(row_format), 2 if to_bfloat16 else 4
    found = factors_of(chunk, row)
    scales, minima = found.scales, [] if found.minima is None else [found.minima]
    target = chunk.at(out, CHUNK * item_bytes)
    for number in range(codes.steps):
        for part, packed in enumerate(codes.packed_step(chunk, row, number)):
            place = codes.each * number + codes.high * part
            factors = [scales[part % len(scales)], *minima]
            for quarter in range(LANES // _QUARTER):
                values = _quarter(codes, packed, factors, quarter)
                if to_bfloat16:
                    values = round_to_bfloat16(values)
                _store_quarter(chunk, values, quarter, target + place * item_bytes, item_bytes)


def _quarter(codes: Codes, packed: Vec, factors: list[Vec], quarter: int) -> Vec:
    """The weights in the bytes of four lanes, as float32; `factors` are scales, maybe minima.

    A float16 times a nibble is a float32 to the bit, so a sum with a minimum is rounded once.
    """
    lanes = [_QUARTER * quarter + i // 4 for i in range(LANES)]
    own = packed.view(I8).take(range(LANES * quarter, LANES * (quarter + 1)))
    sixteen = own.astype(I32, signed=codes.is_signed)
    scale, *minimum = (factor.take(lanes) for factor in factors)
    if minimum:
        return sixteen.astype(F32) * scale + minimum[0]
    return (sixteen - codes.offset).astype(F32) * scale


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


def lane_weights(row_format: RowFormat, row: Row, chunk: Chunk) -> Iterator[tuple[int, Vec]]:
    """Each place in a group and the weights there, float32, of a whole chunk: a group a lane.

    The same bits as `emit_widened`'s, of formats whose rows are summed.
    """
    codes, factors = summed_codes(row_format), factors_of(chunk, row)
    scale = factors.scales[0] * codes.unit
    start = chunk.at(row.values, row_format.chunk_bytes)
    for number in range(codes.steps):
        step = chunk.load(chunk.step(start, number), I32)
        for place, weights in codes.weights_of_step(number):
            values = weights(step) * scale
            yield place, values if factors.minima is None else values + factors.minima


class ScaledSum:
    """out += sum of factor * row, row after row; `out` (float32) is in lane order, whole chunks.

    In lane order item i of group g of a whole chunk stands at 16 * i + g of it. The last chunk's
    vectors stand one after the other, each for the lanes of `Rest`:
    `numba_kernels.decode.rows.add_in_order`.
    """

    def __init__(
        self, row_format: RowFormat, rows: list[Row], factors: list[Vec], out: Ptr
    ) -> None:
        self.format = row_format
        self.codes = summed_codes(row_format)
        self.rows = rows
        self.out = out
        self.factors = [(factor * self.codes.unit).spread(LANES) for factor in factors]

    def emit(self, groups: Vec, ahead: list[Row]) -> None:
        """All columns; rows in `ahead` are prefetched in step."""

        def prefetch(begin: Vec, end: Vec) -> None:
            def line(at: Vec) -> None:
                for row in ahead:
                    (row.values + at).prefetch(2)

            for_range(begin, end, LINE_BYTES, line)

        def body(index: Vec) -> None:
            if ahead:
                begin = index * self.format.chunk_bytes
                prefetch(begin, begin + self.format.chunk_bytes)
            self._add(Chunk(index, groups.like(LANES), None))

        def whole(number: Vec) -> None:
            for_range(0, number, 1, body)
            if ahead:
                prefetch(number * self.format.chunk_bytes, row_bytes(self.format, groups))

        with_chunks(groups, self.codes.steps, whole, self._add_rest)

    def emit_chunk(self, groups: Vec, index: Vec) -> None:
        """The columns of one chunk."""
        left = groups - index * CHUNK_GROUPS
        is_whole = left >= CHUNK_GROUPS
        with groups.builder.if_else(is_whole.value, likely=True) as (whole, rest):
            with whole:
                self._add(Chunk(index, groups.like(LANES), None))
            with rest:
                self._add_rest(Rest(index, left, self.codes.steps))

    def _add(self, chunk: Chunk) -> None:
        scales, minima = self._factors(chunk)
        target = chunk.at(self.out, 4 * CHUNK)
        for number in range(self.codes.steps):
            at = [
                chunk.step(chunk.at(row.values, self.format.chunk_bytes), number)
                for row in self.rows
            ]
            steps = [chunk.load(place, I32) for place in at]
            self._add_steps(target, number, steps, scales, minima)

    def _add_rest(self, rest: Rest) -> None:
        scales, minima = (
            [rest.repeated(factor) for factor in factors] for factors in self._factors(rest.chunk)
        )
        target = rest.chunk.at(self.out, 4 * CHUNK)

        def turn(index: Vec) -> None:
            steps = [
                rest.load(rest.chunk.at(row.values, self.format.chunk_bytes), index)
                for row in self.rows
            ]
            at = target + index * (4 * CHUNK // self.codes.steps)
            self._add_steps(at, 0, steps, scales, minima)

        rest.each_turn(turn)

    def _factors(self, chunk: Chunk) -> tuple[list[Vec], list[Vec]]:
        """The rows' scales, times their factors where there are no minima, and minima."""
        found = [factors_of(chunk, row) for row in self.rows]
        scales = [factors.scales[0] for factors in found]
        minima = [factors.minima for factors in found if factors.minima is not None]
        if not minima:
            scales = [s * factor for s, factor in zip(scales, self.factors, strict=True)]
        return scales, minima

    def _add_steps(
        self, target: Ptr, number: int, steps: list[Vec], scales: list[Vec], minima: list[Vec]
    ) -> None:
        """Add step `number` of each row; `target` is where the sums of step 0 are."""
        for place, weights in self.codes.weights_of_step(number):
            cell = target + 4 * LANES * place
            total = cell.load(F32, LANES)
            for row, (step, scale) in enumerate(zip(steps, scales, strict=True)):
                if minima:
                    weight = weights(step).fma(scale, minima[row])
                    total = weight.fma(self.factors[row], total)
                else:
                    total = weights(step).fma(scale, total)
            cell.store(total)
