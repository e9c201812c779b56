"""Dot products of a row's bytes and a vector's, by the best instruction that the CPU has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llvmlite import ir

from hotcold.numba_kernels.formats import RowFormat
from hotcold.numba_kernels.ir.codes import codes_of
from hotcold.numba_kernels.ir.quantized_ir import INTS, signed_byte
from hotcold.numba_kernels.ir.target import LANES, has_feature, has_vnni
from hotcold.numba_kernels.ir.vec import I8, I16, I32, Vec, shaped


class ByteDot:
    """sum[lane] += product of four bytes of weights with four of a vector, exactly.

    VNNI multiplies unsigned with signed bytes, so signed codes get 128 added, and `offset` times a
    group's sum of values is what that, or the format's offset, adds too much. Values beside a
    minimum have no offset. AVX2 multiplies bytes to pairs of 16 bits. Eight pairs of nibbles'
    products fit in them, all that a lane has of a chunk: they are added up before they become 32
    bits. VNNI leaves high nibbles where they are if a second chain of additions is theirs.
    """

    def __init__(self, row_format: RowFormat, num_chains: int) -> None:
        codes = codes_of(row_format)
        offset = codes.offset
        self.is_signed = codes.is_signed
        self.vnni = has_vnni()
        self.avx2 = has_feature("avx2") and not self.vnni
        self.in_pairs = self.avx2 and codes.fits_pairs
        self.high_in_place = self.vnni and codes.high_can_stay and num_chains == 2
        of_groups = 0 if row_format.has_halves else offset
        self.offset = 128 if self.is_signed and self.vnni else of_groups
        # There are no sums of halves of a group.
        self.half_offset = offset if row_format.has_halves and self.vnni else 0
        self.subtracted = offset if row_format.has_halves and not self.vnni else 0

    def empty(self, builder: ir.IRBuilder) -> Vec:
        """Sums of nothing."""
        if self.in_pairs:
            return Vec.full(builder, 0, I16, 2 * LANES)
        return Vec.full(builder, 0, I32, LANES)

    def add(self, total: Vec, weights: Vec, values: Vec) -> Vec:
        """The sums with one step's products added."""
        if self.subtracted:
            weights = (weights.view(I8) - self.subtracted).view(I32)
        if self.vnni:
            return self._vnni(total, weights, values)
        if self.avx2:
            is_signed = self.is_signed or self.subtracted > 0
            pairs = _by_halves(partial(avx2_pairs, is_signed), weights.view(I8), values.view(I8))
            return total + (pairs if self.in_pairs else _by_halves(avx2_fours, pairs))
        for byte in range(4):
            total = total + signed_byte(weights, byte) * signed_byte(values, byte)
        return total

    def add_offset(self, total: Vec, values: Vec) -> Vec:
        """The sums of values times `half_offset`, with one step's added."""
        if not self.half_offset:
            return total
        return self._dot(total, values.view(I8).like(self.half_offset), values.view(I8))

    def end(self, chains: list[Vec]) -> Vec:
        """All chains of sums together, int32, `offset` still in them."""
        total = chains[0]
        for more in chains[1:]:
            total = total + (more.shifted_right(4) if self.high_in_place else more)
        return _by_halves(avx2_fours, total) if self.in_pairs else total

    def _vnni(self, total: Vec, weights: Vec, values: Vec) -> Vec:
        if self.is_signed:
            weights = weights ^ 0x80808080 - (1 << 32)
        return self._dot(total, weights.view(I8), values.view(I8))

    def _dot(self, total: Vec, unsigned: Vec, signed: Vec) -> Vec:
        return total.call("llvm.x86.avx512.vpdpbusd.512", INTS, total, unsigned, signed)


def avx2_pairs(is_signed: bool, weights: Vec, values: Vec) -> Vec:
    """Products of the bytes of one register, two added up in 16 bits.

    |weight| <= 127 and |value| <= 127, so no pair overflows.
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


def _by_halves(of_register: Callable[..., Vec], *vectors: Vec) -> Vec:
    """What AVX2 makes of vectors of two registers."""
    width = vectors[0].lanes // 2
    low, high = (
        of_register(*(vector.take(range(first, first + width)) for vector in vectors))
        for first in (0, width)
    )
    return low.take(range(2 * low.lanes), high)
