"""Compiled loops of `quantize`: rows of flat arrays, a group of 32 weights at a time."""

import numpy as np
from numba import float32, int32, uint8, uint32

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.formats import CHUNK_GROUPS, E2M1_VALUES, MAX_EXPONENT, QUANT_GROUP
from hotcold.numba_kernels.ir.bit_ir import float32_bits, float32_from_bits, float32_of, half_bits

# What became of rows; the largest of all rows' is returned.
DONE, TOO_LARGE, NOT_FINITE = 0, 1, 2
AS_Q8, AS_Q4, AS_Q4_1, AS_MXFP4 = range(4)

_SIGN = np.uint32(1 << 31)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITE = np.uint32(0x7F800000)
_MAX_SCALE = np.float32(65520.0)  # from here on float16 is infinite
_MAGNITUDES = np.array(E2M1_VALUES[:8], np.float32)
_MAX_EXPONENT = np.uint8(MAX_EXPONENT)
_CHUNK_GROUPS, _GROUP = np.int64(CHUNK_GROUPS), np.int64(QUANT_GROUP)


@njit(nogil=True, cache=True)
def _load_group(source, values):
    """values = source in float32; returns the bits of the largest value (0 where all are negative)
    and those of the most negative one (0 where there is none). Bits order as magnitudes do.
    """
    highest = int32(0)
    lowest = uint32(0)
    for k in range(values.shape[0]):
        value = float32_of(source[k])
        values[k] = value
        bits = float32_bits(value)
        highest = max(highest, int32(bits))
        lowest = max(lowest, bits)
    return uint32(highest), (lowest if lowest >= _SIGN else uint32(0))


@njit(nogil=True, cache=True)
def _q8_group(values, highest, lowest, codes):
    """Fill `codes` with int8 bits; returns the scale."""
    scale = float32_from_bits(max(highest, lowest & _MAGNITUDE)) / float32(127)
    inverse = _reciprocal(scale)
    for k in range(codes.shape[0]):
        scaled = values[k] * inverse
        size = abs(scaled)
        whole = int32(size)
        whole += int32(size - float32(whole) >= float32(0.5))
        codes[k] = uint8(-whole if scaled < 0 else whole)
    return scale


@njit(nogil=True, cache=True)
def _q4_group(values, highest, lowest, codes):
    """Fill `codes` with nibbles; returns the scale."""
    extreme = highest
    if lowest & _MAGNITUDE > highest:
        extreme = lowest
    elif lowest & _MAGNITUDE == highest:
        extreme = _first_extreme(values, highest)
    scale = float32_from_bits(extreme) / float32(-8)
    inverse = _reciprocal(scale)
    for k in range(codes.shape[0]):
        codes[k] = uint8(min(int32(15), int32(values[k] * inverse + float32(8.5))))
    return scale


@njit(nogil=True, cache=True)
def _q4_1_group(values, codes):
    """Fill `codes` with nibbles; returns the scale and the minimum."""
    least, most = values[0], values[0]
    for value in values:
        least, most = min(least, value), max(most, value)
    scale = (most - least) / float32(15)
    inverse = _reciprocal(scale)
    for k in range(codes.shape[0]):
        codes[k] = uint8(min(int32(15), int32((values[k] - least) * inverse + float32(0.5))))
    return scale, least


@njit(nogil=True, cache=True)
def power_of_two(exponent):
    """2 ^ (exponent - 128) of a byte; the smallest two are subnormal numbers. NaN of 255."""
    if exponent == uint8(255):
        return float32(np.nan)
    if exponent < uint8(2):
        return float32_from_bits(uint32(1 << 21) << uint32(exponent))
    return float32_from_bits(uint32(exponent - uint8(1)) << uint32(23))


@njit(nogil=True, cache=True)
def _mxfp4_group(values, highest, lowest, codes):
    """Fill `codes` with nibbles; returns the exponent: the largest value is 8 to 16 times it."""
    power = int32(max(highest, lowest & _MAGNITUDE) >> uint32(23))
    exponent = uint8(min(int32(_MAX_EXPONENT), max(int32(0), power - int32(2))))
    unit = power_of_two(exponent)
    for k in range(codes.shape[0]):
        size, code = abs(values[k]), 0
        while code < 7 and size - unit * _MAGNITUDES[code] > unit * _MAGNITUDES[code + 1] - size:
            code += 1
        codes[k] = uint8(code + 8 if values[k] < 0 and code else code)
    return exponent


@njit(nogil=True, cache=True)
def _first_extreme(values, magnitude):
    for value in values:
        bits = float32_bits(value)
        if bits & _MAGNITUDE == magnitude:
            return bits
    return magnitude


@njit(nogil=True, cache=True)
def _reciprocal(scale):
    """1 / scale; 0 where that is infinite."""
    if float32_bits(scale) & _MAGNITUDE == uint32(0):
        return float32(0)
    inverse = float32(1) / scale
    return inverse if float32_bits(inverse) & _MAGNITUDE < _INFINITE else float32(0)


@njit(nogil=True, cache=True)
def _group_status(highest, lowest, scale):
    if max(highest, lowest & _MAGNITUDE) >= _INFINITE:
        return NOT_FINITE
    return TOO_LARGE if abs(scale) >= _MAX_SCALE else DONE


@njit(nogil=True, cache=True)
def store_q8(codes, target, group, num_groups):
    """Lay a group's codes (int8 bits) into the row `target` of Q8."""
    first = group // _CHUNK_GROUPS * _CHUNK_GROUPS
    step = 4 * min(_CHUNK_GROUPS, num_groups - first)
    place = target[first * _GROUP + 4 * (group - first) :]
    for j in range(8):
        for b in range(4):
            place[j * step + b] = codes[4 * j + b]


@njit(nogil=True, cache=True)
def store_q4(codes, target, group, num_groups, has_halves):
    """Lay a group's codes (nibbles) into the row `target` of Q4 or another of 4 bits."""
    each, upper = (4, 16) if has_halves else (8, 4)
    first = group // _CHUNK_GROUPS * _CHUNK_GROUPS
    step = 4 * min(_CHUNK_GROUPS, num_groups - first)
    place = target[first * _GROUP // 2 + 4 * (group - first) :]
    for j in range(4):
        for b in range(4):
            high = codes[each * j + upper + b] << uint8(4)
            place[j * step + b] = codes[each * j + b] | uint8(high)


@njit(nogil=True, cache=True)
def store_q5(codes, target, group, num_groups):
    """Lay a group's codes (0..31) into the row `target` of Q5 or Q5_K."""
    first = group // _CHUNK_GROUPS * _CHUNK_GROUPS
    step = 4 * min(_CHUNK_GROUPS, num_groups - first)
    place = target[first * _GROUP // 8 * 5 + 4 * (group - first) :]
    for b in range(4):
        tops = uint8(0)
        for i in range(8):
            tops |= uint8(codes[4 * i + b] >> uint8(4) << uint8(i))
        for j in range(4):
            low, high = codes[8 * j + b] & uint8(15), codes[8 * j + 4 + b] & uint8(15)
            place[j * step + b] = low | uint8(high << uint8(4))
        place[4 * step + b] = tops


@njit(nogil=True, cache=True)
def store_q6(codes, target, group, num_groups):
    """Lay a group's codes (0..63) into the row `target` of Q6."""
    first = group // _CHUNK_GROUPS * _CHUNK_GROUPS
    step = 4 * min(_CHUNK_GROUPS, num_groups - first)
    place = target[first * _GROUP // 8 * 6 + 4 * (group - first) :]
    for b in range(4):
        for j in range(4):
            low, high = codes[4 * j + b], codes[16 + 4 * j + b]
            place[j * step + b] = low & uint8(15) | uint8((high & uint8(15)) << uint8(4))
        for j in range(2):
            pairs = uint8(0)
            for k in range(4):
                code = codes[k % 2 * 16 + 4 * (2 * (k // 2) + j) + b]
                pairs |= uint8(code >> uint8(4) << uint8(2 * k))
            place[(4 + j) * step + b] = pairs


@njit(nogil=True, cache=True, inline="always")
def store_codes(bits, has_halves, codes, target, group, num_groups):
    """Lay a group's codes of so many bits into the row `target`, where halves may have scales."""
    if bits == 8:
        store_q8(codes, target, group, num_groups)
    elif bits == 4:
        store_q4(codes, target, group, num_groups, has_halves)
    elif bits == 5:
        store_q5(codes, target, group, num_groups)
    else:
        store_q6(codes, target, group, num_groups)


@njit(nogil=True, cache=True, _nrt=True)
def quantize_kernel(way, src, src_step, row_ids, dst, dst_step, width):
    """Quantize rows of `src` into rows of bytes; returns a status, checks no shapes.

    way: AS_Q8, AS_Q4, AS_Q4_1 or AS_MXFP4, which never returns TOO_LARGE
    `src` and `dst` are flat, their rows so many items apart; see `loading.flat_rows`.
    """
    values, codes = np.empty(_GROUP, np.float32), np.empty(_GROUP, np.uint8)
    num_groups, worst, bits = width // _GROUP, DONE, 8 if way == AS_Q8 else 4
    for row in range(row_ids.shape[0]):
        source = src[row_ids[row] * src_step :][:width]
        target = dst[row * dst_step :]
        factors = target[width * bits // 8 :]
        for group in range(num_groups):
            highest, lowest = _load_group(source[group * _GROUP : (group + 1) * _GROUP], values)
            scale, least = float32(0), float32(0)
            if way == AS_Q8:
                scale = _q8_group(values, highest, lowest, codes)
            elif way == AS_Q4:
                scale = _q4_group(values, highest, lowest, codes)
            elif way == AS_Q4_1:
                scale, least = _q4_1_group(values, codes)
                store_half(factors, num_groups + group, least)
            else:
                factors[group] = _mxfp4_group(values, highest, lowest, codes)
            worst = max(worst, _group_status(highest, lowest, max(abs(scale), abs(least))))
            if way != AS_MXFP4:
                store_half(factors, group, scale)
            store_codes(bits, False, codes, target, group, num_groups)
    return worst


@njit(nogil=True, cache=True)
def store_half(factors, number, value):
    """Lay a scale or a minimum into those of a row, as float16."""
    bits = half_bits(value)
    factors[2 * number] = uint8(bits & 255)
    factors[2 * number + 1] = uint8(bits >> 8)
