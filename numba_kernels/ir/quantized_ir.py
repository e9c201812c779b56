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
from numba import types
from numba.core import cgutils

from hotcold.numba_kernels.formats import (
    CHUNK_GROUPS,
    QUANT_GROUP,
    ROW_FORMATS,
    SCALE_BYTES,
    RowFormat,
)
from hotcold.numba_kernels.ir.target import LANES, has_feature
from hotcold.numba_kernels.ir.vec import (
    F32,
    I32,
    I64,
    Ptr,
    Var,
    Vec,
    for_range,
    shaped,
    stack_space,
)

BYTE_LANES = 4 * LANES
INTS = ir.VectorType(I32, LANES)
_HALF_LANES = LANES // 2
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
        bytes_a_block = row_format.group_factor_bytes
        second = first + groups // row_format.block_groups * (bytes_a_block or SCALE_BYTES)
        return cls(row_format, start, first, second)


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


def each_chunk(num_groups: Vec, body: Callable[[Chunk], None]) -> None:
    """Emit `body` for all whole chunks, and for what is left."""
    builder = num_groups.builder
    lanes, whole = num_groups.like(LANES), num_groups // CHUNK_GROUPS
    for_range(0, whole, 1, lambda index: body(Chunk(index, lanes, None)))
    rest = num_groups - whole * CHUNK_GROUPS
    with builder.if_then(rest.differs(0).value, likely=False):
        body(_last_chunk(whole, rest))


def one_chunk(num_groups: Vec, index: Vec, body: Callable[[Chunk], None]) -> None:
    """Emit `body` for chunk `index`, whole or the last one."""
    left = num_groups - index * CHUNK_GROUPS
    is_whole = left >= CHUNK_GROUPS
    with num_groups.builder.if_else(is_whole.value, likely=True) as (whole, rest):
        with whole:
            body(Chunk(index, num_groups.like(LANES), None))
        with rest:
            body(_last_chunk(index, left))


def _last_chunk(index: Vec, num_lanes: Vec) -> Chunk:
    """A chunk of fewer groups than lanes."""
    return Chunk(index, num_lanes, _first_lanes(index, num_lanes))


def _first_lanes(index: Vec, number: Vec) -> Vec:
    return Vec.of(index.builder, range(LANES), I32).below(number.astype(I32))


class SideBySide:
    """How many steps of a last chunk of g groups share a vector of some lanes: 2 ** halvings.

    As many as fit: step i of those has lanes i * g to (i + 1) * g - 1.
    `numba_kernels.formats.steps_side_by_side` says the same of numbers.
    """

    def __init__(self, num_groups: Vec, steps: int, lanes: int) -> None:
        """steps: of a chunk."""
        self._num_steps = steps
        self.halvings = num_groups.like(0)
        for doublings in range(1, steps.bit_length()):
            fits = num_groups.below((lanes >> doublings) + 1)
            self.halvings = self.halvings + fits.astype(I64, signed=False)
        self.num_turns = num_groups.like(steps) >> self.halvings
        self.num_lanes = num_groups << self.halvings

    def fold(self, sums: list[Var]) -> None:
        """Add up all steps of each group in the lanes of the first step."""
        for number in range(self._num_steps.bit_length() - 1):
            distance = (self.num_lanes >> number + 1).astype(I32)
            with distance.builder.if_then(self.halvings.like(number).below(self.halvings).value):
                for total in sums:
                    total.set(total.get() + moved_down(total.get(), distance))


class Rest(SideBySide):
    """A row's last chunk of g < 16 groups, in vectors of 16 lanes."""

    def __init__(self, index: Vec, num_groups: Vec, steps: int) -> None:
        """steps: of a chunk."""
        self.chunk = _last_chunk(index, num_groups)
        super().__init__(num_groups, steps, LANES)
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
        places = lanes - self.step_of_lanes() * self.chunk.num_lanes.astype(I32)
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

    def step_of_lanes(self) -> Vec:
        """Which of the steps side by side each lane is of: lane // groups."""
        groups = self.chunk.num_lanes.astype(I32)
        inverse = groups.like(256) // groups + 1
        return Vec.of(groups.builder, range(LANES), I32) * inverse >> 8


def _zeroed_space(builder: Any, num_vectors: int) -> Ptr:
    """Memory on the stack for so many vectors, zeros."""
    return Ptr(builder, cgutils.alloca_once(builder, ir.ArrayType(INTS, num_vectors)))


def moved_down(ints: Vec, distance: Vec) -> Vec:
    """Lane i + distance of a vector in lane i; any numbers in lanes for which there is none.

    With AVX2 of two registers only the first's lanes are right, which are all that sums need.
    """
    builder, kind = ints.builder, ints.value.type
    if ints.lanes == LANES and has_feature("avx2") and not has_feature("avx512f"):
        places = Vec.of(builder, range(_HALF_LANES), I32) + distance
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
    places = Vec.of(builder, range(ints.lanes), I32) + distance
    if ints.lanes == LANES and has_feature("avx512f"):
        return ints.call("llvm.x86.avx512.permvar.si.512", kind, ints, places)
    if ints.lanes == _HALF_LANES and has_feature("avx2"):
        return ints.call("llvm.x86.avx2.permd", kind, ints, places)
    space = stack_space(builder, ir.ArrayType(I32, 2 * ints.lanes))
    for half in range(2):
        (space + half * 4 * ints.lanes).store(ints)
    return (space + distance.astype(I64) * 4).load(I32, ints.lanes)


def with_chunks(
    num_groups: Vec, steps: int, whole: Callable[[Vec], None], rest: Callable[[Rest], None]
) -> None:
    """Emit whole(number of whole chunks), then `rest` where groups are left."""
    number = num_groups // CHUNK_GROUPS
    whole(number)
    left = num_groups - number * CHUNK_GROUPS
    with num_groups.builder.if_then(left.differs(0).value):
        rest(Rest(number, left, steps))


def signed_byte(packed: Vec, byte: int) -> Vec:
    """Byte `byte` of every lane as a signed number."""
    return (packed << 24 - 8 * byte if byte < 3 else packed).shifted_right(24)
