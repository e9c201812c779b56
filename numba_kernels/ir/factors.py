"""Vector IR that reads a chunk's scales and minima: a function for each of `formats.Factors`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hotcold.numba_kernels import formats
from hotcold.numba_kernels.formats import CHUNK_GROUPS, SCALE_BYTES
from hotcold.numba_kernels.ir.quantized_ir import Chunk, Row
from hotcold.numba_kernels.ir.target import LANES, has_feature
from hotcold.numba_kernels.ir.vec import F32, HALF, I8, I16, I32, Ptr, Vec

_FACTOR_BYTES = CHUNK_GROUPS * SCALE_BYTES  # of a chunk's scales, or minima
_BLOCK_LANES = 8  # groups of a block that has a scale of its own
_CHUNK_BLOCKS = CHUNK_GROUPS // _BLOCK_LANES


@dataclass(frozen=True)
class Factors:
    """What a chunk's values are multiplied with, and what is added, float32.

    scales: of its groups, or of their first and of their second halves; minima: None without any
    """

    scales: list[Vec]
    minima: Vec | None = None


def factors_of(chunk: Chunk, row: Row) -> Factors:
    """The factors of a row's groups; finite in lanes without one, whose codes are zeros."""
    return _READERS[row.format.factors](chunk, row)


def _scales(chunk: Chunk, row: Row) -> Factors:
    return Factors([_float16(chunk, row.first)])


def _scales_and_minima(chunk: Chunk, row: Row) -> Factors:
    minima = _float16(chunk, row.second)
    return Factors([_float16(chunk, row.first)], minima)


def _six_bits(chunk: Chunk, row: Row) -> Factors:
    """Two numbers of six bits a lane: low nibbles of both, then their upper two bits."""
    at, blocks = _small(chunk, row), _of_blocks(chunk, row)
    low = _bytes(chunk, at)
    upper = (at + chunk.num_lanes).load(I8, LANES // 2 if chunk.mask is None else 4, align=1)
    tops = (upper & 15).take(range(2 * upper.lanes), upper >> 4 & 15)
    tops = tops if chunk.mask is None else tops.take(range(LANES), tops)
    pairs = low & 15 | (tops & 3) << 4, low >> 4 & 15 | (tops & 12) << 2
    scales, minima = (
        numbers.astype(I32, signed=False).astype(F32) * block
        for numbers, block in zip(pairs, blocks, strict=True)
    )
    return Factors([scales], minima)


def _exponents(chunk: Chunk, row: Row) -> Factors:
    """A power of two a lane. What other lanes get is finite: no byte gives infinity or NaN."""
    at = chunk.at(row.first, CHUNK_GROUPS)
    if chunk.mask is None or has_feature("avx512bw"):
        return Factors([powers_of_two(chunk.load(at, I8))])
    if not has_feature("avx2"):
        return Factors([powers_of_two(at.load_masked(I8, chunk.mask))])
    # Masked loads of bytes are slow: the 16 bytes that end with the row, moved down.
    absent = chunk.num_lanes.like(LANES) - chunk.num_lanes
    places = Vec.of(at.builder, range(LANES), I8) + absent.astype(I8)
    last = (at + (chunk.num_lanes + -LANES)).load(I8, LANES, align=1)
    name = "llvm.x86.ssse3.pshuf.b.128"
    return Factors([powers_of_two(last.call(name, last.value.type, last, places))])


def powers_of_two(exponents: Vec) -> Vec:
    """2 ^ (exponent - 128) of bytes, as float32: two of them are subnormal numbers."""
    wide = exponents.astype(I32, signed=False)
    return wide.below(2).where(wide + 1 << 21, wide - 1 << 23).view(F32)


def _halves(chunk: Chunk, row: Row) -> Factors:
    """An int8 for each half of a group."""
    at, blocks = _small(chunk, row), _of_blocks(chunk, row)
    halves = [_bytes(chunk, at), _bytes(chunk, at + chunk.num_lanes)]
    return Factors([half.astype(I32).astype(F32) * blocks[0] for half in halves])


_READERS: dict[formats.Factors, Callable[[Chunk, Row], Factors]] = {
    formats.SCALES: _scales,
    formats.MINIMA: _scales_and_minima,
    formats.SIX_BITS: _six_bits,
    formats.HALVES: _halves,
    formats.EXPONENTS: _exponents,
}


def _float16(chunk: Chunk, start: Ptr) -> Vec:
    """The float16 of a row's groups, as float32."""
    at = chunk.at(start, _FACTOR_BYTES)
    if chunk.mask is None or has_feature("avx512bw"):
        return chunk.load(at, HALF).astype(F32)
    return _few_float16(chunk, at).astype(F32)


def _few_float16(chunk: Chunk, at: Ptr) -> Vec:
    """A float16 a lane by words of two, where the CPU has masked loads of words alone."""
    places = Vec.of(at.builder, range(LANES // 2), I32)
    whole = (chunk.num_lanes >> 1).astype(I32)
    words = at.load_masked(I32, places.below(whole))
    last = (at + (chunk.num_lanes * 2 + -2)).load(I16, align=1).astype(I32, signed=False)
    is_odd = (chunk.num_lanes & 1).differs(0)
    return places.equals(is_odd.where(whole, -1)).where(last, words).view(HALF)


def _small(chunk: Chunk, row: Row) -> Ptr:
    """Where a chunk's small whole numbers are."""
    return chunk.at(row.first, CHUNK_GROUPS * row.format.factors.group_bits // 8)


def _of_blocks(chunk: Chunk, row: Row) -> list[Vec]:
    """The float16 of each lane's block, as float32, one or two; 0 in lanes without one."""
    count = row.format.factors.num_float16
    at = chunk.at(row.second, row.format.factor_bytes * _CHUNK_BLOCKS)
    if chunk.mask is None:
        found = at.load(HALF, count * _CHUNK_BLOCKS, align=1).astype(F32)
        places = [count * (lane // _BLOCK_LANES) for lane in range(LANES)]
        return [found.take([place + i for place in places]) for i in range(count)]
    each = [(at + SCALE_BYTES * i).load(HALF, align=1).astype(F32) for i in range(count)]
    return [chunk.mask.where(one.spread(LANES), 0) for one in each]


def _bytes(chunk: Chunk, at: Ptr) -> Vec:
    """A byte a lane. A part of a chunk has one block."""
    if chunk.mask is None:
        return at.load(I8, LANES, align=1)
    few = at.load(I8, _BLOCK_LANES, align=1)
    return few.take(range(LANES), few)
