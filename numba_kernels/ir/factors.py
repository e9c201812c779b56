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
_CHUNK_PAIRS = CHUNK_GROUPS // 2


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
    return Factors([powers_of_two(_any_bytes(chunk, chunk.at(row.first, CHUNK_GROUPS)))])


def _any_bytes(chunk: Chunk, at: Ptr) -> Vec:
    """A byte a lane, of a part of a chunk of any size; any bytes in lanes without a group."""
    if chunk.mask is None or has_feature("avx512bw"):
        return chunk.load(at, I8)
    if not has_feature("avx2"):
        return at.load_masked(I8, chunk.mask)
    # Masked loads of bytes are slow: the 16 bytes that end with these, in the row, moved down.
    absent = chunk.num_lanes.like(LANES) - chunk.num_lanes
    places = Vec.of(at.builder, range(LANES), I8) + absent.astype(I8)
    last = (at + (chunk.num_lanes + -LANES)).load(I8, LANES, align=1)
    return last.call("llvm.x86.ssse3.pshuf.b.128", last.value.type, last, places)


def powers_of_two(exponents: Vec) -> Vec:
    """2 ^ (exponent - 128) of bytes, as float32: two of them are subnormal numbers."""
    wide = exponents.astype(I32, signed=False)
    return wide.below(2).where(wide + 1 << 21, wide - 1 << 23).view(F32)


def _int8s(chunk: Chunk, row: Row) -> Factors:
    """An int8 for a group."""
    return _scaled_int8s(chunk, row, [_bytes(chunk, _small(chunk, row))])


def _halves(chunk: Chunk, row: Row) -> Factors:
    """An int8 for each half of a group."""
    at = _small(chunk, row)
    return _scaled_int8s(chunk, row, [_bytes(chunk, at), _bytes(chunk, at + chunk.num_lanes)])


def _scaled_int8s(chunk: Chunk, row: Row, numbers: list[Vec]) -> Factors:
    """Numbers times their blocks' scales and the format's unit: 19 bits, exact."""
    (blocks,), unit = _of_blocks(chunk, row), row.format.unit
    units = blocks if unit == 1 else blocks * unit
    return Factors([number.astype(I32).astype(F32) * units for number in numbers])


def _e4m3s(chunk: Chunk, row: Row) -> Factors:
    """An E4M3 number for each half of a group, and a float32 for two groups."""
    at, blocks_at = _small(chunk, row), chunk.at(row.second, 4 * _CHUNK_PAIRS)
    if chunk.mask is None:
        found = blocks_at.load(F32, _CHUNK_PAIRS, align=1)
    else:
        pairs = (chunk.num_lanes >> 1).astype(I32)
        mask = Vec.of(at.builder, range(_CHUNK_PAIRS), I32).below(pairs)
        found = blocks_at.load_masked(F32, mask)
    blocks = found.take([lane // 2 for lane in range(LANES)]) * row.format.unit
    halves = (_any_bytes(chunk, at), _any_bytes(chunk, at + chunk.num_lanes))
    return Factors([small_floats(half) * blocks for half in halves])


def small_floats(bytes_: Vec) -> Vec:
    """E4M3 numbers without their signs as float32: the bits of 2 ^ -120 times them."""
    return ((bytes_.astype(I32, signed=False) & 127) << 20).view(F32) * 2.0**120


_READERS: dict[formats.Factors, Callable[[Chunk, Row], Factors]] = {
    formats.SCALES: _scales,
    formats.MINIMA: _scales_and_minima,
    formats.SIX_BITS: _six_bits,
    formats.HALVES: _halves,
    formats.INT8S: _int8s,
    formats.E4M3S: _e4m3s,
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
