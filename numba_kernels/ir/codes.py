"""Vector IR that takes codes out of a row's chunks: a class for each of `formats.Codes`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hotcold.numba_kernels import formats
from hotcold.numba_kernels.formats import RowFormat
from hotcold.numba_kernels.ir.quantized_ir import BYTE_LANES, Chunk, Rest, Row
from hotcold.numba_kernels.ir.target import LANES, has_feature, has_vnni
from hotcold.numba_kernels.ir.vec import F32, I8, I32, Ptr, Vec

# The weights of one step: each one's place in a group, and what takes it out of a lane.
StepWeights = list[tuple[int, Callable[[Vec], Vec]]]
AddTurn = Callable[[Vec, list[list[Vec]]], None]
SMALL_VALUE = 16  # a group's products of values up to this fit 16 bits


class Codes:
    """Codes of rows of one format. A step is a word of each group; its parts hold one code a byte.

    A chunk's packed steps, each of one or two parts, hold all of its codes; what stands above
    nibbles follows them.
    """

    steps = 4  # packed ones
    # Codes from a step to the next, and to those of its high nibbles.
    each, high = 8, 4
    is_signed = False
    max_pairs = 0  # of products, whose sum fits 16 bits
    high_can_stay = False  # whether high nibbles may stay in place, as 16 times their value

    def __init__(self, row_format: RowFormat) -> None:
        self.format = row_format
        self.offset = row_format.offset  # what codes are too large by when they are taken out

    def unpacked(self, loaded: Vec, in_place: bool = False) -> list[Vec]:
        """The parts of a step, without what stands above nibbles.

        High nibbles that stay in place are 16 times their value.
        """
        high = loaded & 0xF0F0F0F0 - (1 << 32) if in_place else loaded >> 4 & 0x0F0F0F0F
        return [loaded & 0x0F0F0F0F, high]

    def packed_step(self, chunk: Chunk, row: Row, number: int, in_place: bool = False) -> list[Vec]:
        """Load and unpack step `number` of a row."""
        return self.unpacked(self._load(chunk, row, number), in_place)

    def each_rest(
        self, rest: Rest, starts: list[Ptr], in_place: bool, in_line: bool, add: AddTurn
    ) -> None:
        """add(turn, parts of each row) for each vector of steps of a last chunk at `starts`."""

        def turn(index: Vec) -> None:
            add(index, self._turn(rest, starts, index, in_place))

        if in_line:
            rest.each_turn_in_line(turn)
        else:
            rest.each_turn(turn)

    def _turn(self, rest: Rest, starts: list[Ptr], index: Vec, in_place: bool) -> list[list[Vec]]:
        loaded = [rest.load(start, index) for start in starts]
        return [self.unpacked(values, in_place) for values in loaded]

    def _load(self, chunk: Chunk, row: Row, number: int) -> Vec:
        start = chunk.at(row.values, self.format.chunk_bytes)
        return chunk.load(chunk.step(start, number), I32)


class Bytes(Codes):
    """8 bits, signed."""

    steps = 8
    each, high = 4, 0
    is_signed = True
    unit = 2.0**-24  # of what `weights_of_step` takes out

    def unpacked(self, loaded: Vec, in_place: bool = False) -> list[Vec]:
        """One part: the bytes."""
        return [loaded]

    def weights_of_step(self, number: int) -> StepWeights:
        """Step `number`'s weights without factors, for sums of rows."""
        return [(4 * number + byte, partial(_byte_weights, byte)) for byte in range(4)]


class Nibbles(Codes):
    """4 bits."""

    max_pairs = 8
    high_can_stay = True
    unit = 1.0

    def weights_of_step(self, number: int) -> StepWeights:
        """Step `number`'s weights without factors, for sums of rows."""
        return [
            (8 * number + 4 * half + byte, partial(self._weights, 2 * byte + half))
            for byte in range(4)
            for half in range(2)
        ]

    def _weights(self, number: int, step: Vec) -> Vec:
        """Nibble `number` of every lane, less the offset; AVX-512 looks it up in a register."""
        shifted = step >> 4 * number if number else step
        if has_feature("avx512f"):
            return _looked_up(shifted, [code - self.offset for code in range(16)])
        return ((shifted & 0xF) - self.offset).astype(F32)


class Table(Nibbles):
    """4 bits that number values, which are looked up. VNNI's are unsigned: an offset is added.

    Where halves have their own scales, low nibbles are of a group's first half.
    """

    high_can_stay = False

    def __init__(self, row_format: RowFormat) -> None:
        super().__init__(row_format)
        self._values = row_format.codes.values
        is_small = max(map(abs, self._values)) <= SMALL_VALUE
        self.max_pairs = 8 if is_small else 0
        self.offset = (SMALL_VALUE if is_small else 128) if has_vnni() else 0
        self.is_signed = not self.offset
        if row_format.has_halves:
            self.each, self.high = 4, 16

    def unpacked(self, loaded: Vec, in_place: bool = False) -> list[Vec]:
        """The values of low and of high nibbles, the offset added."""
        table = [value + self.offset for value in self._values]
        return [_looked_up_bytes(loaded, table), _looked_up_bytes(loaded >> 4, table)]

    def _weights(self, number: int, step: Vec) -> Vec:
        shifted = step >> 4 * number if number else step
        if has_feature("avx512f"):
            return _looked_up(shifted, self._values)
        if not has_feature("avx2"):
            return _selected(shifted, self._values).astype(F32)
        low, high = (_looked_up_by_halves(shifted, self._values[first:][:8]) for first in (0, 8))
        return (shifted << 28 < 0).where(high, low)


class Fifths(Codes):
    """5 bits: nibbles, and a fifth step of the bits above them."""

    max_pairs = 4

    def packed_step(self, chunk: Chunk, row: Row, number: int, in_place: bool = False) -> list[Vec]:
        """Load and unpack step `number`, with the bits of the fifth."""
        loaded, fifths = (self._load(chunk, row, step) for step in (number, self.steps))
        tops = [_upper_bits(fifths, 2 * number + half) for half in range(2)]
        return self._with_tops(loaded, tops)

    def _turn(self, rest: Rest, starts: list[Ptr], index: Vec, in_place: bool) -> list[list[Vec]]:
        loaded = [rest.load(start, index) for start in starts]
        tops = [self._upper_bits_of_turn(rest, start, index) for start in starts]
        return [self._with_tops(*row) for row in zip(loaded, tops, strict=True)]

    def _upper_bits_of_turn(self, rest: Rest, start: Ptr, turn: Vec) -> list[Vec]:
        """The fifth bits of a turn's low and of its high nibbles, as bit 4 of bytes."""
        of_groups = rest.chunk.load(rest.chunk.step(start, self.steps), I32)
        words = rest.repeated(of_groups.view(F32)).view(I32)
        bit = ((turn << rest.halvings).astype(I32) + rest.step_of_lanes()) << 1
        return [(words >> bit + half & 0x01010101) << 4 for half in range(2)]

    def _with_tops(self, nibbles: Vec, tops: list[Vec]) -> list[Vec]:
        """The low and the high nibbles, with the bits above them."""
        return [part | top for part, top in zip(self.unpacked(nibbles), tops, strict=True)]


class Pairs(Fifths):
    """6 bits: nibbles, and two steps of two bits above them. Rows have whole blocks of 8 groups."""

    each, high = 4, 16

    def packed_step(self, chunk: Chunk, row: Row, number: int, in_place: bool = False) -> list[Vec]:
        """Load and unpack step `number`, with bits of one of the last two."""
        loaded, pairs = (self._load(chunk, row, step) for step in (number, self.steps + number % 2))
        return self._joined(loaded, pairs, number // 2)

    def each_rest(
        self, rest: Rest, starts: list[Ptr], in_place: bool, in_line: bool, add: AddTurn
    ) -> None:
        """Half a chunk: two steps in each of three vectors."""
        last = rest.halvings.like(2)
        for number in range(2):
            index = rest.halvings.like(number)
            add(
                index,
                [
                    self._joined(rest.load(start, index), rest.load(start, last), number)
                    for start in starts
                ],
            )

    def _joined(self, nibbles: Vec, pairs: Vec, turn: int) -> list[Vec]:
        """Of each byte of `pairs` the first turn takes the low half, the second the high one."""
        low, high = (pairs << 4, pairs << 2) if turn == 0 else (pairs, pairs >> 2)
        return self._with_tops(nibbles, [low & 0x30303030, high & 0x30303030])


_CLASSES: dict[formats.Codes, type[Codes]] = {
    formats.BYTES: Bytes,
    formats.NIBBLES: Nibbles,
    formats.FIFTHS: Fifths,
    formats.PAIRS: Pairs,
}


def codes_of(row_format: RowFormat) -> Codes:
    """What takes out the codes of a format's rows."""
    codes = row_format.codes
    return (Table if codes.values else _CLASSES[codes])(row_format)


def summed_codes(row_format: RowFormat) -> Bytes | Nibbles:
    """`codes_of` a format whose rows are summed."""
    codes = codes_of(row_format)
    assert isinstance(codes, Bytes | Nibbles)
    return codes


def _upper_bits(fifths: Vec, bit: int) -> Vec:
    """Bit `bit` of every byte, as its bit 4."""
    return (fifths << 4 - bit if bit <= 4 else fifths >> bit - 4) & 0x10101010


def _byte_weights(byte: int, step: Vec) -> Vec:
    """Byte `byte` of every lane, times 2^24: moved to the lane's top by one shuffle."""
    zero = BYTE_LANES  # a place in the second operand, all zeros
    places = [place for lane in range(LANES) for place in (zero, zero, zero, 4 * lane + byte)]
    zeros = Vec.full(step.builder, 0, I8, BYTE_LANES)
    return step.view(I8).take(places, zeros).view(I32).astype(F32)


def _looked_up(codes: Vec, values: Sequence[int]) -> Vec:
    """The value of each lane's low four bits, float32; AVX-512."""
    table = Vec.of(codes.builder, values, F32)
    return table.call("llvm.x86.avx512.permvar.sf.512", table.value.type, table, codes)


def _looked_up_by_halves(codes: Vec, values: Sequence[int]) -> Vec:
    """The value of each lane's low three bits, float32; AVX2."""
    table = Vec.of(codes.builder, values, F32)
    low, high = (
        table.call("llvm.x86.avx2.permps", table.value.type, table, codes.take(range(at, at + 8)))
        for at in (0, 8)
    )
    return low.take(range(LANES), high)


def _looked_up_bytes(codes: Vec, values: Sequence[int]) -> Vec:
    """The value of each byte's low four bits, a byte."""
    places = codes.view(I8)
    is_whole = places.lanes == BYTE_LANES
    if is_whole and has_feature("avx512vbmi"):  # which reads six bits
        return _shuffled("llvm.x86.avx512.permvar.qi.512", values, places).view(I32)
    places = places & 0xF
    if is_whole and has_feature("avx512bw"):
        return _shuffled("llvm.x86.avx512.pshuf.b.512", values, places).view(I32)
    if has_feature("avx2"):
        return _by_parts("llvm.x86.avx2.pshuf.b", 32, values, places).view(I32)
    if has_feature("neon"):
        return _by_parts("llvm.aarch64.neon.tbl1.v16i8", 16, values, places).view(I32)
    return _selected(places, values).view(I32)


def _by_parts(name: str, width: int, values: Sequence[int], places: Vec) -> Vec:
    """`_shuffled` of registers of `width` bytes, joined."""
    parts = [
        _shuffled(name, values, places.take(range(first, first + width)))
        for first in range(0, places.lanes, width)
    ]
    while len(parts) > 1:
        parts = [
            a.take(range(2 * a.lanes), b) for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def _shuffled(name: str, values: Sequence[int], places: Vec) -> Vec:
    """Bytes of a table that is repeated through a whole register."""
    table = Vec.of(places.builder, _signed(values) * (places.lanes // len(values)), I8)
    return table.call(name, table.value.type, table, places)


def _signed(values: Sequence[int]) -> list[int]:
    """The same bytes as signed numbers."""
    return [(value + 128) % 256 - 128 for value in values]


def _selected(codes: Vec, values: Sequence[int]) -> Vec:
    """The value of each item's low four bits, of the items' type: halved bit by bit."""
    found = [codes.like(value) for value in _signed(values)]
    for bit in range(len(values).bit_length() - 1):
        is_odd = (codes & 1 << bit).differs(0)
        found = [is_odd.where(high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
    return found[0]
