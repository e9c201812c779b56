"""Dot products of a row's bytes and a vector's, by the best instruction that the CPU has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llvmlite import ir

from hotcold.numba_kernels.formats import RowFormat
from hotcold.numba_kernels.ir.codes import SMALL_VALUE, codes_of
from hotcold.numba_kernels.ir.quantized_ir import signed_byte
from hotcold.numba_kernels.ir.target import LANES, has_feature, vnni_lanes
from hotcold.numba_kernels.ir.vec import I8, I16, I32, Vec, shaped

_VNNI = {16: "llvm.x86.avx512.vpdpbusd.512", 8: "llvm.x86.avx512.vpdpbusd.256"}  # by lanes
_AVX2_LANES = 8


class ByteDot:
    """sum[lane] += product of four bytes of weights with four of a vector, exactly.

    VNNI multiplies unsigned with signed bytes, so signed codes get 128 added, and `offset` times a
    group's sum of values is what that, or the format's offset, adds too much. Values beside a
    minimum have no offset. AVX2 multiplies bytes to pairs of 16 bits. Eight pairs of nibbles'
    products fit in them, all that a lane has of a chunk: they are added up before they become 32
    bits. Of parts of a chunk codes below bytes are unsigned, and sums begin with minus what that
    adds. VNNI leaves high nibbles where they are if a second chain of additions is theirs.
    """

    def __init__(self, row_format: RowFormat, num_chains: int, of_parts: bool = False) -> None:
        """of_parts: for `unpacked_ir`, whose sums are of a chunk's parts, or of both of them."""
        codes = codes_of(row_format)
        offset = codes.offset
        self.is_signed = codes.is_signed
        self.vnni = vnni_lanes()
        self.avx2 = has_feature("avx2") and not self.vnni
        begins = of_parts and self.avx2 and codes.max_pairs > 0
        # What is added to signed codes; and what all are too large by, times which sums of values
        # are taken off beforehand (`add_begin`).
        self.added = SMALL_VALUE if begins and self.is_signed else 0
        self.begin_offset = offset + self.added if begins else 0
        if self.begin_offset:
            self.is_signed, offset = False, 0
        num_pairs = 4 if of_parts or row_format.has_halves else 8
        self.in_pairs = self.avx2 and codes.max_pairs >= num_pairs
        # Whether parts have sums of their own, as those of both do not fit: of fifths with minima.
        self.has_part_sums = begins and not self.begin_offset and codes.max_pairs < 8
        self.high_in_place = self.vnni > 0 and codes.high_can_stay and num_chains == 2
        of_groups = 0 if row_format.has_halves else offset
        self.offset = 128 if self.is_signed and self.vnni else of_groups
        # There are no sums of halves of a group.
        self.half_offset = offset if row_format.has_halves and self.vnni else 0
        self.subtracted = offset if row_format.has_halves and not self.vnni else 0

    def empty(self, builder: ir.IRBuilder, lanes: int = LANES) -> Vec:
        """Sums of nothing."""
        if self.in_pairs:
            return Vec.full(builder, 0, I16, 2 * lanes)
        return Vec.full(builder, 0, I32, lanes)

    def taken(self, weights: Vec) -> Vec:
        """A step's codes as instructions take them."""
        if self.subtracted or self.added:
            return (weights.view(I8) + (self.added - self.subtracted)).view(I32)
        return weights ^ 0x80808080 - (1 << 32) if self.vnni and self.is_signed else weights

    def add(self, total: Vec, weights: Vec, values: Vec) -> Vec:
        """The sums with one step's products added."""
        return self.add_taken(total, self.taken(weights), values)

    def add_taken(self, total: Vec, weights: Vec, values: Vec) -> Vec:
        """`add` of what `taken` gave."""
        if self.vnni:
            return self._dot(total, weights.view(I8), values.view(I8))
        if self.avx2:
            is_signed = self.is_signed or self.subtracted > 0
            pairs = _by_registers(
                4 * _AVX2_LANES, partial(avx2_pairs, is_signed), weights.view(I8), values.view(I8)
            )
            return total + (pairs if self.in_pairs else _fours(pairs))
        for byte in range(4):
            total = total + signed_byte(weights, byte) * signed_byte(values, byte)
        return total

    def add_offset(self, total: Vec, values: Vec) -> Vec:
        """The sums of values times `half_offset`, with one step's added."""
        if not self.half_offset:
            return total
        offsets = values.view(I8).like(self.half_offset - (self.half_offset & 128) * 2)
        return self._dot(total, offsets, values.view(I8))

    def add_begin(self, total: Vec, values: Vec) -> Vec:
        """What sums begin with, one step's values times `begin_offset` less.

        Sums of 16 bits may wrap meanwhile: each ends as the sum of products with signed codes. A
        lane has at most 16 of them, of magnitudes to 16 and 127: 32,512, which fits.
        """
        codes = values.view(I8).like(self.begin_offset)
        return total - avx2_pairs(False, codes, values.view(I8))

    def end(self, chains: list[Vec]) -> Vec:
        """All chains of sums together, int32, `offset` still in them."""
        total = chains[0]
        for more in chains[1:]:
            total = total + (more.shifted_right(4) if self.high_in_place else more)
        return _fours(total) if self.in_pairs else total

    def _dot(self, total: Vec, unsigned: Vec, signed: Vec) -> Vec:
        return _by_registers(self.vnni, _vnni_dot, total, unsigned.view(I32), signed.view(I32))


def _vnni_dot(total: Vec, unsigned: Vec, signed: Vec) -> Vec:
    name = _VNNI[total.lanes]
    return total.call(name, total.value.type, total, unsigned.view(I8), signed.view(I8))


def avx2_pairs(is_signed: bool, weights: Vec, values: Vec) -> Vec:
    """Products of the bytes of one register, two added up in 16 bits.

    |weight| <= 128 and |value| <= 127, so no pair overflows.
    """
    kind = weights.value.type
    if is_signed:
        values = values.call("llvm.x86.avx2.psign.b", kind, values, weights)
        weights = (weights < 0).where(-weights, weights)
    pairs = shaped(I16, weights.lanes // 2)
    return weights.call("llvm.x86.avx2.pmadd.ub.sw", pairs, weights, values)


def avx2_fours(pairs: Vec) -> Vec:
    """Neighbours of 16 bits of one register added up to 32 bits."""
    kind = shaped(I32, pairs.lanes // 2)
    return pairs.call("llvm.x86.avx2.pmadd.wd", kind, pairs, pairs.like(1))


def _fours(pairs: Vec) -> Vec:
    """`avx2_fours` of one register or two."""
    return _by_registers(2 * _AVX2_LANES, avx2_fours, pairs)


def _by_registers(width: int, of_register: Callable[..., Vec], *vectors: Vec) -> Vec:
    """What a function of registers of `width` items makes of vectors of one register or two."""
    if vectors[0].lanes == width:
        return of_register(*vectors)
    low, high = (
        of_register(*(vector.take(range(first, first + width)) for vector in vectors))
        for first in (0, width)
    )
    return low.take(range(2 * low.lanes), high)
