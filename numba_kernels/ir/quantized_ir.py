"""Vector IR for quantized rows: where their chunks are, and what their lanes hold.

A chunk of 16 groups has one group in each 32-bit lane (`numba_kernels.formats`). The last chunk may
have fewer; several of its steps then stand side by side in a vector, so that it takes about as
many instructions as it has bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from hotcold.numba_kernels.formats import (
    CHUNK,
    CHUNK_GROUPS,
    QUANT_GROUP,
    ROW_FORMATS,
    SCALE_BYTES,
    RowFormat,
)
from hotcold.numba_kernels.ir.target import LANES, has_feature
from hotcold.numba_kernels.ir.vec import (
    F32,
    HALF,
    I8,
    I16,
    I32,
    I64,
    Ptr,
    Var,
    Vec,
    for_range,
    shaped,
)

BYTE_LANES = 4 * LANES
INTS = ir.VectorType(I32, LANES)
_HALF_LANES = LANES // 2
CHUNK_BYTES = {bits: CHUNK * bits // 8 for bits in (8, 6, 5, 4)}
PACKED_STEPS = {8: 8, 6: 4, 5: 4, 4: 4}  # of a chunk, by which its values are unpacked
FACTOR_BYTES = CHUNK_GROUPS * SCALE_BYTES  # of a chunk's scales, or minima
BLOCK_LANES = 8  # groups of a block that has a scale of its own
_CHUNK_BLOCKS = CHUNK_GROUPS // BLOCK_LANES
_BY_NAME = {dtype.names: row_format for dtype, row_format in ROW_FORMATS.items()}


def format_of(dtype: Any) -> RowFormat | None:
    """The format of an array dtype of quantized rows in compiled code, None for any other."""
    return _BY_NAME[tuple(dtype.fields)] if isinstance(dtype, types.Record) else None


def row_bytes(row_format: RowFormat, num_groups: Vec) -> Vec:
    """The bytes of a row of so many groups."""
    return num_groups // row_format.block_groups * row_format.block_bytes


@dataclass(frozen=True)
class Row:
    """A quantized row of so many groups: where its values and its factors are.

    The factors of groups are float16, `second` where their minima are; or small whole numbers, and
    `second` is where the float16 of blocks are.
    """

    format: RowFormat
    values: Ptr
    first: Ptr
    second: Ptr

    @classmethod
    def at(cls, row_format: RowFormat, start: Ptr, groups: Vec) -> Row:
        """The row of so many groups that begins at `start`."""
        first = start + groups * (QUANT_GROUP * row_format.bits // 8)
        bytes_a_block = row_format.block_groups * row_format.group_bits // 8
        second = first + groups // row_format.block_groups * (bytes_a_block or SCALE_BYTES)
        return cls(row_format, start, first, second)


@dataclass(frozen=True)
class Factors:
    """What a chunk's values are multiplied with, and what is added, float32.

    scales: of its groups, or of their first and of their second halves; minima: None without any
    """

    scales: list[Vec]
    minima: Vec | None = None


@dataclass(frozen=True)
class Vector:
    """A quantized vector: where its values, scales (float32) and sums of values (int32) are."""

    values: Ptr
    scales: Ptr
    sums: Ptr


@dataclass(frozen=True)
class Chunk:
    """Up to 16 groups, one in each lane; loads leave the lanes beyond them alone.

    index: the chunk's number; mask: a bit for each lane that holds a group, None where all do
    """

    index: Vec
    num_lanes: Vec
    mask: Vec | None

    def at(self, start: Ptr, bytes_a_chunk: int) -> Ptr:
        """Where this chunk's part is."""
        return start + self.index * bytes_a_chunk

    def step(self, start: Ptr, number: int) -> Ptr:
        """Where row `number` of 32-bit lanes from `start` on is."""
        return start + self.num_lanes * (4 * number)

    def load(self, at: Ptr, dtype: Any) -> Vec:
        """A vector of one item of `dtype` a lane."""
        if self.mask is None:
            return at.load(dtype, LANES, align=1)
        return at.load_masked(dtype, self.mask)

    def factors(self, row: Row) -> Factors:
        """The factors of a row's groups."""
        if not row.format.in_blocks:
            minima = self._halves(row.second) if row.format.has_min else None
            return Factors([self._halves(row.first)], minima)
        at = self.at(row.first, CHUNK_GROUPS * row.format.group_bits // 8)
        blocks = self._of_blocks(row)
        if row.format.has_halves:
            halves = [self._bytes(at), self._bytes(at + self.num_lanes)]
            return Factors([half.astype(I32).astype(F32) * blocks[0] for half in halves])
        scales, minima = (
            numbers.astype(I32, signed=False).astype(F32) * block
            for numbers, block in zip(self._six_bits(at), blocks, strict=True)
        )
        return Factors([scales], minima)

    def _halves(self, start: Ptr) -> Vec:
        """The float16 of a row's groups, as float32."""
        at = self.at(start, FACTOR_BYTES)
        if self.mask is None or has_feature("avx512bw"):
            return self.load(at, HALF).astype(F32)
        return self._few_halves(at).astype(F32)

    def _of_blocks(self, row: Row) -> list[Vec]:
        """The float16 of each lane's block, as float32, one or two; 0 in lanes without one."""
        count = row.format.factor_bytes // SCALE_BYTES
        at = self.at(row.second, row.format.factor_bytes * _CHUNK_BLOCKS)
        if self.mask is None:
            found = at.load(HALF, count * _CHUNK_BLOCKS, align=1).astype(F32)
            places = [count * (lane // BLOCK_LANES) for lane in range(LANES)]
            return [found.take([place + i for place in places]) for i in range(count)]
        each = [(at + SCALE_BYTES * i).load(HALF, align=1).astype(F32) for i in range(count)]
        return [self.mask.where(one.spread(LANES), 0) for one in each]

    def _bytes(self, at: Ptr) -> Vec:
        """A byte a lane. A part of a chunk has one block."""
        if self.mask is None:
            return at.load(I8, LANES, align=1)
        few = at.load(I8, BLOCK_LANES, align=1)
        return few.take(range(LANES), few)

    def _six_bits(self, at: Ptr) -> tuple[Vec, Vec]:
        """Two numbers of six bits a lane: low nibbles of both, then their upper two bits."""
        low = self._bytes(at)
        upper = (at + self.num_lanes).load(I8, LANES // 2 if self.mask is None else 4, align=1)
        tops = (upper & 15).take(range(2 * upper.lanes), upper >> 4 & 15)
        tops = tops if self.mask is None else tops.take(range(LANES), tops)
        return low & 15 | (tops & 3) << 4, low >> 4 & 15 | (tops & 12) << 2

    def _few_halves(self, at: Ptr) -> Vec:
        """A float16 a lane by words of two, where the CPU has masked loads of words alone."""
        places = Vec.of(at.builder, range(LANES // 2), I32)
        whole = (self.num_lanes >> 1).astype(I32)
        words = at.load_masked(I32, places.below(whole))
        last = (at + (self.num_lanes * 2 + -2)).load(I16, align=1).astype(I32, signed=False)
        is_odd = (self.num_lanes & 1).differs(0)
        return places.equals(is_odd.where(whole, -1)).where(last, words).view(HALF)


def each_chunk(num_groups: Vec, body: Callable[[Chunk], None]) -> None:
    """Emit `body` for all whole chunks, and for what is left."""
    builder = num_groups.builder
    lanes, whole = num_groups.like(LANES), num_groups // CHUNK_GROUPS
    for_range(0, whole, 1, lambda index: body(Chunk(index, lanes, None)))
    rest = num_groups - whole * CHUNK_GROUPS
    with builder.if_then(rest.differs(0).value, likely=False):
        body(_last_chunk(whole, rest))


def _last_chunk(index: Vec, num_lanes: Vec) -> Chunk:
    """A chunk of fewer groups than lanes."""
    return Chunk(index, num_lanes, _first_lanes(index, num_lanes))


def _first_lanes(index: Vec, number: Vec) -> Vec:
    return Vec.of(index.builder, range(LANES), I32).below(number.astype(I32))


def packed_steps(
    chunk: Chunk, bits: int, row: Row, number: int, in_place: bool = False
) -> list[Vec]:
    """Load and unpack step `number` of a row, as `unpacked`: 4 bytes a lane, of one value each."""
    start = chunk.at(row.values, CHUNK_BYTES[bits])
    loaded = chunk.load(chunk.step(start, number), I32)
    if bits == 6:
        place = PACKED_STEPS[bits] + number % 2
        return joined(loaded, chunk.load(chunk.step(start, place), I32), number // 2)
    if bits == 5:
        fifths = chunk.load(chunk.step(start, PACKED_STEPS[bits]), I32)
        tops = [_upper_bits(fifths, 2 * number + half) for half in range(2)]
        return with_tops(loaded, tops)
    return unpacked(bits, loaded, in_place)


def unpacked(bits: int, loaded: Vec, in_place: bool = False) -> list[Vec]:
    """Bytes of one value each: one vector of 8 bits, or the low and the high nibbles of 4.

    High nibbles that stay in place are 16 times their value.
    """
    if bits == 8:
        return [loaded]
    high = loaded & 0xF0F0F0F0 - (1 << 32) if in_place else loaded >> 4 & 0x0F0F0F0F
    return [loaded & 0x0F0F0F0F, high]


def joined(nibbles: Vec, pairs: Vec, turn: int) -> list[Vec]:
    """Values of 6 bits: the low and the high nibbles, with two bits above them.

    Of each byte of `pairs` the first turn takes the low half, the second the high one.
    """
    low, high = (pairs << 4, pairs << 2) if turn == 0 else (pairs, pairs >> 2)
    return with_tops(nibbles, [low & 0x30303030, high & 0x30303030])


def with_tops(nibbles: Vec, tops: list[Vec]) -> list[Vec]:
    """The low and the high nibbles, with the bits above them."""
    return [part | top for part, top in zip(unpacked(4, nibbles), tops, strict=True)]


def _upper_bits(fifths: Vec, bit: int) -> Vec:
    """Bit `bit` of every byte, as its bit 4."""
    return (fifths << 4 - bit if bit <= 4 else fifths >> bit - 4) & 0x10101010


class Rest:
    """A row's last chunk of g < 16 groups, `side` steps of it in each vector.

    `side` is a power of two, as many as fit into 16 lanes: step i of those has lanes i * g to
    (i + 1) * g - 1. `numba_kernels.formats.steps_side_by_side` says the same of numbers.
    """

    def __init__(self, index: Vec, num_groups: Vec, bits: int) -> None:
        self.chunk = _last_chunk(index, num_groups)
        self.halvings = num_groups.like(0)  # side is 2 to so many
        self._num_steps = steps = PACKED_STEPS[bits]  # of a chunk
        for doublings in range(1, steps.bit_length()):
            fits = num_groups.below(LANES // (1 << doublings) + 1)
            self.halvings = self.halvings + fits.astype(I64, signed=False)
        self.num_turns = (num_groups.like(steps)) >> self.halvings
        self.num_lanes = num_groups << self.halvings
        self._mask = _first_lanes(index, self.num_lanes)

    def each_turn(self, body: Callable[[Vec], None]) -> None:
        """Emit `body(turn)` for each vector of steps."""
        for_range(0, self.num_turns, 1, body)

    def each_turn_in_line(self, body: Callable[[Vec], None]) -> None:
        """`each_turn` without a loop: there are one, two, four ... turns, or all steps."""
        number, done = self.num_turns, 1
        body(number.like(0))
        while done < self._num_steps:
            with number.builder.if_then(number.like(done).below(number).value):
                for turn in range(done, min(2 * done, self._num_steps)):
                    body(number.like(turn))
            done *= 2

    def load(self, start: Ptr, turn: Vec) -> Vec:
        """The steps of a turn, of those that begin at `start`; 0 in the lanes beyond them."""
        return (start + turn * self.num_lanes * 4).load_masked(I32, self._mask)

    def upper_bits(self, start: Ptr, turn: Vec) -> list[Vec]:
        """The fifth bits of a turn's low and of its high nibbles, as bit 4 of bytes."""
        of_groups = self.chunk.load(self.chunk.step(start, self._num_steps), I32)
        words = self.repeated(of_groups.view(F32)).view(I32)
        bit = ((turn << self.halvings).astype(I32) + self._step_of_lanes()) << 1
        return [(words >> bit + half & 0x01010101) << 4 for half in range(2)]

    def fold(self, sums: list[Var]) -> None:
        """Add up all steps of each group in the lanes of the first step."""
        for number in range(self._num_steps.bit_length() - 1):
            distance = (self.num_lanes >> number + 1).astype(I32)
            with distance.builder.if_then(self.halvings.like(number).below(self.halvings).value):
                for total in sums:
                    total.set(total.get() + self._moved_down(total.get(), distance))

    def _moved_down(self, ints: Vec, distance: Vec) -> Vec:
        """Lane i + distance in lane i, for the first eight lanes; in others any numbers."""
        if has_feature("avx512f"):
            places = Vec.of(ints.builder, range(LANES), I32) + distance
            return ints.call("llvm.x86.avx512.permvar.si.512", INTS, ints, places)
        if not has_feature("avx2"):
            space = _zeroed_space(ints.builder, 2)
            space.store(ints)
            (space + 4 * LANES).store(ints)  # any numbers
            return (space + distance.astype(I64) * 4).load(I32, LANES)
        places = Vec.of(ints.builder, range(_HALF_LANES), I32) + distance
        low, high = (
            ints.take(range(first, first + _HALF_LANES)).call(
                "llvm.x86.avx2.permd",
                shaped(I32, _HALF_LANES),
                ints.take(range(first, first + _HALF_LANES)),
                places,
            )
            for first in (0, _HALF_LANES)
        )
        moved = places.below(_HALF_LANES).where(low, high)
        return moved.take(range(LANES), moved.like(0))

    def repeated(self, numbers: Vec) -> Vec:
        """The numbers (float32) of the groups, once for each step of a vector."""
        if not has_feature("avx2"):
            space = _zeroed_space(numbers.builder, 2)
            for_range(
                0,
                self.num_turns.like(1) << self.halvings,
                1,
                lambda step: (space + step * self.chunk.num_lanes * 4).store(numbers),
            )
            return space.load(F32, LANES)
        lanes = Vec.of(numbers.builder, range(LANES), I32)
        places = lanes - self._step_of_lanes() * self.chunk.num_lanes.astype(I32)
        low, high = (
            numbers.take(range(_HALF_LANES)).call(
                "llvm.x86.avx2.permps",
                shaped(F32, _HALF_LANES),
                numbers.take(range(_HALF_LANES)),
                places.take(range(first, first + _HALF_LANES)),
            )
            for first in (0, _HALF_LANES)
        )
        return self.halvings.equals(0).spread(LANES).where(numbers, low.take(range(LANES), high))

    def _step_of_lanes(self) -> Vec:
        """Which of the steps side by side each lane is of: lane // groups."""
        groups = self.chunk.num_lanes.astype(I32)
        inverse = groups.like(256) // groups + 1
        return Vec.of(groups.builder, range(LANES), I32) * inverse >> 8


def _zeroed_space(builder: Any, num_vectors: int) -> Ptr:
    """Memory on the stack for so many vectors, zeros."""
    return Ptr(builder, cgutils.alloca_once(builder, ir.ArrayType(INTS, num_vectors)))


def with_chunks(
    num_groups: Vec, bits: int, whole: Callable[[Vec], None], rest: Callable[[Rest], None]
) -> None:
    """Emit whole(number of whole chunks), then `rest` where groups are left."""
    number = num_groups // CHUNK_GROUPS
    whole(number)
    left = num_groups - number * CHUNK_GROUPS
    with num_groups.builder.if_then(left.differs(0).value):
        rest(Rest(number, left, bits))


def value_offset(row_format: RowFormat) -> int:
    """How much a stored value exceeds the number that it stands for."""
    return 0 if row_format.has_min else {8: 0, 6: 32, 5: 16, 4: 8}[row_format.bits]


def signed_byte(packed: Vec, byte: int) -> Vec:
    """Byte `byte` of every lane as a signed number."""
    return (packed << 24 - 8 * byte if byte < 3 else packed).shifted_right(24)
