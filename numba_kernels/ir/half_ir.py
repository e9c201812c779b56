"""A row's last, partial chunk with AVX2: by vectors of 8 lanes, as wide as its registers.

Masked loads are slow there, and empty lanes cost as much as others. Here a load also reads what
follows the groups: after a whole chunk that is still in the row, or in a vector's buffer
(`numba_kernels.decode.vectors`). Scales of those lanes are zeros, so they add nothing.
"""

from __future__ import annotations

from hotcold.numba_kernels.formats import CHUNK, CHUNK_GROUPS, SCALE_BYTES, RowFormat
from hotcold.numba_kernels.ir.byte_dot import ByteDot
from hotcold.numba_kernels.ir.codes import codes_of
from hotcold.numba_kernels.ir.quantized_ir import Row, SideBySide, Vector
from hotcold.numba_kernels.ir.target import LANES, has_feature
from hotcold.numba_kernels.ir.vec import F32, HALF, I32, Ptr, Var, Vec, shaped

_LANES = LANES // 2
_FLOATS = shaped(F32, _LANES)


def takes_halves(row_format: RowFormat) -> bool:
    """Whether last chunks of a format are read so."""
    is_avx2 = has_feature("avx2") and not has_feature("avx512f")
    return is_avx2 and row_format.is_plain


class Halves(SideBySide):
    """A row's last chunk of 0 < g < 16 groups after at least one whole chunk, times vectors.

    Where 2 g or 4 g are at most 8, two or four of its steps stand side by side in a vector.
    """

    def __init__(
        self, row_format: RowFormat, row: Row, vectors: list[Vector], groups: Vec, index: Vec
    ) -> None:
        """groups: of the whole row; index: the last chunk's number."""
        self.format, self.codes = row_format, codes_of(row_format)
        self.row, self.vectors, self.all_groups, self.index = row, vectors, groups, index
        self.builder = groups.builder
        self.groups = groups - index * CHUNK_GROUPS
        self.has_second = groups.like(_LANES).below(self.groups)
        self.steps = self.codes.steps
        super().__init__(self.groups, self.steps, _LANES)
        self.multiply = ByteDot(row_format, 1)
        ints = Vec.full(self.builder, 0, I32, _LANES)
        self.counts = [[Var(ints) for _ in vectors] for _ in range(2)]  # of each half

    def count(self) -> None:
        """Read the values: integer sums of all groups."""
        zeros = self.multiply.empty(self.builder, _LANES)
        sums = [Var(zeros) for _ in self.vectors]
        self._first_half(sums)
        ends = [Var(self.multiply.end([total.get()])) for total in sums]
        self.fold(ends)
        for cell, end in zip(self.counts[0], ends, strict=True):
            cell.set(end.get())
        with self.builder.if_then(self.has_second.value):
            more = [Var(zeros) for _ in self.vectors]
            for turn in range(self.steps):
                self._add(more, self.groups.like(turn), 4 * _LANES)
            for cell, total in zip(self.counts[1], more, strict=True):
                cell.set(self.multiply.end([total.get()]))

    def add_scaled(self, totals: list[Var]) -> None:
        """Add the integer sums to the totals (16 lanes), with scales and minima."""
        self._add_half(totals, 0)
        with self.builder.if_then(self.has_second.value):
            self._add_half(totals, 1)

    def _first_half(self, sums: list[Var]) -> None:
        """There are one, two, four ... turns, or all steps."""
        self._add(sums, self.groups.like(0), 0)
        done = 1
        while done < self.steps:
            with self.builder.if_then(self.groups.like(done).below(self.num_turns).value):
                for turn in range(done, 2 * done):
                    self._add(sums, self.groups.like(turn), 0)
            done *= 2

    def _add(self, sums: list[Var], turn: Vec, offset: int) -> None:
        """Add the products of one vector of the row, `offset` bytes into its steps."""
        at = turn * self.num_lanes * 4 + offset
        loaded = _load(self.row.values + self.index * self.format.chunk_bytes + at, I32)
        for part, weights in enumerate(self.codes.unpacked(loaded)):
            place = self.index * CHUNK + self.groups * (part * CHUNK // 2 // CHUNK_GROUPS) + at
            for total, vector in zip(sums, self.vectors, strict=True):
                values = _load(vector.values + place, I32)
                total.set(self.multiply.add(total.get(), weights, values))

    def _add_half(self, totals: list[Var], half: int) -> None:
        """Add the counts of lanes 0 to 7, or of 8 to 15."""
        lane = _LANES * half
        first = self.index * CHUNK_GROUPS + lane
        left = (self.groups + -lane).minimum(_LANES)
        mask = Vec.of(self.builder, range(_LANES), I32).below(left.astype(I32))
        factors, minima = self._halves(self.row.first, first), None
        if self.format.has_min:
            minima = self._halves(self.row.second, first)
        offset = self.multiply.offset
        for total, vector, cell in zip(totals, self.vectors, self.counts[half], strict=True):
            scales, count = (vector.scales + first * 4).load_masked(F32, mask), cell.get()
            sums = None
            if offset or minima:
                sums = _load(vector.sums + first * 4, I32)
            if offset and sums:
                count = count - (sums << offset.bit_length() - 1)
            parts = [total.get().take(range(at, at + _LANES)) for at in (0, _LANES)]
            parts[half] = count.astype(F32).fma(factors * scales, parts[half])
            if minima and sums:
                parts[half] = minima.fma(sums.astype(F32) * scales, parts[half])
            total.set(parts[0].take(range(LANES), parts[1]))

    def _halves(self, start: Ptr, first: Vec) -> Vec:
        """The float16 of groups from `first` on, as float32.

        Where fewer than 8 are left, the row's last 8 are read and moved down.
        """
        begin = first.minimum(self.all_groups + -_LANES)
        numbers = _load(start + begin * SCALE_BYTES, HALF).astype(F32)
        places = Vec.of(self.builder, range(_LANES), I32) + (first - begin).astype(I32)
        return numbers.call("llvm.x86.avx2.permps", _FLOATS, numbers, places)


def _load(at: Ptr, dtype: object) -> Vec:
    return at.load(dtype, _LANES, align=1)
