"""Compiled loops over ggml's blocks: values in float32, and codes that our rows take as they are.

A type is what `_group` makes of 32 of its weights: numbers, and scales of both halves, small
integers; and where it has them minima, `_minima`. weight = block's scale * scale * value of the
number - block's minimum * minimum.
Source:  ggml-quants.c, dequantize_row_*; ggml-common.h, the blocks' layouts
"""

import numpy as np
from numba import float32, int8, int32, uint8, uint16, uint32

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.formats import (
    BLOCK_FORMATS,
    CHUNK_GROUPS,
    E2M1_VALUES,
    E4M3S,
    EXPONENTS,
    HALVES,
    INT8S,
    IQ2_VALUES,
    IQ3_S_VALUES,
    IQ3_XXS_VALUES,
    IQ4_VALUES,
    MAX_EXPONENT,
    MINIMA,
    NF4_NUMBERS,
    NF4_VALUES,
    Q3_VALUES,
    QUANT_GROUP,
    SCALES,
    SIX_BITS,
    block_dtype,
)
from hotcold.numba_kernels.ir.bit_ir import float32_from_bits, float32_of
from hotcold.numba_kernels.load.grids import grid_of
from hotcold.numba_kernels.load.quantize_kernels import (
    DONE,
    NOT_FINITE,
    power_of_two,
    store_codes,
    store_half,
)

# What a kernel returns for numbers that rows do not take as they are.
DOES_NOT_FIT = 3
_LARGEST_HALF = np.float32(65504)
# Factors of rows, as `repack_kernel` knows them.
FACTORS = (SCALES, MINIMA, SIX_BITS, HALVES, EXPONENTS, E4M3S, INT8S)
_SCALES, _MINIMA, _SIX_BITS, _HALVES, _EXPONENTS, _E4M3S, _INT8S = range(len(FACTORS))
_GROUP, _CHUNK_GROUPS = np.int64(QUANT_GROUP), np.int64(CHUNK_GROUPS)
_MAX_EXPONENT = np.int32(MAX_EXPONENT)


def _code(name):
    return BLOCK_FORMATS[block_dtype(name)].ggml_type


_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0 = (
    _code(f"Q{name}") for name in ("4_0", "4_1", "5_0", "5_1", "8_0")
)
_Q2_K, _Q3_K, _Q4_K, _Q5_K, _Q6_K = (_code(f"Q{bits}_K") for bits in (2, 3, 4, 5, 6))
_IQ2_XXS, _IQ2_XS, _IQ2_S = (_code(f"IQ2_{name}") for name in ("XXS", "XS", "S"))
_IQ3_XXS, _IQ3_S, _IQ4_XS, _IQ4_NL = (
    _code(f"IQ{name}") for name in ("3_XXS", "3_S", "4_XS", "4_NL")
)
_IQ1_S, _IQ1_M = _code("IQ1_S"), _code("IQ1_M")
_MXFP4, _NVFP4 = _code("MXFP4"), _code("NVFP4")
_NVFP4_BYTES = BLOCK_FORMATS[block_dtype("NVFP4")].num_bytes  # behind which a scale may be
_NF4 = BLOCK_FORMATS[NF4_NUMBERS].ggml_type
_TQ1_0, _TQ2_0, _Q1_0, _Q2_0 = (_code(name) for name in ("TQ1_0", "TQ2_0", "Q1_0", "Q2_0"))


def _by_type(default, dtype, values):
    """An array of each type's value; `values` by type."""
    found = np.full(64, default, dtype)
    for code, value in values.items():
        found[code] = value
    return found


# Where a block's scale is; its minimum is behind it. What numbers have too much.
_SCALE_AT = _by_type(0, np.int64, {_Q2_K: 80, _Q3_K: 108, _Q6_K: 208, _TQ1_0: 52, _TQ2_0: 64})
_OF_FEW_BITS = dict.fromkeys((_TQ1_0, _TQ2_0, _Q1_0, _Q2_0), 1)
_OFFSETS = _by_type(0, np.int32, {_Q4_0: 8, _Q5_0: 16, _Q6_K: 32, **_OF_FEW_BITS})
# What the first bytes of nibbles, and of their fifth bits, are.
_NIBBLES_AT = _by_type(0, np.int64, {_Q4_0: 2, _Q4_1: 4, _Q5_0: 6, _Q5_1: 8, _IQ4_NL: 2, _MXFP4: 1})
_FIFTHS_AT = _by_type(0, np.int64, {_Q5_0: 2, _Q5_1: 4})
# Values that are looked up, 1 / unit times as large: the table's number, -1 for none.
_VALUES = np.array(
    (IQ4_VALUES, E2M1_VALUES, Q3_VALUES, IQ3_S_VALUES, IQ3_XXS_VALUES, IQ2_VALUES, NF4_VALUES),
    np.int8,
)
_TABLES = _by_type(
    -1, np.int64,
    {_IQ4_NL: 0, _IQ4_XS: 0, _MXFP4: 1, _NVFP4: 1, _Q3_K: 2, _IQ3_S: 3, _IQ3_XXS: 4,
     _NF4: 6, **dict.fromkeys((_IQ2_XXS, _IQ2_XS, _IQ2_S, _IQ1_S, _IQ1_M), 5)},
)  # fmt: skip
_UNITS = np.array((1, 1, 1, 1, 1 / 4, 1 / 8, 1), np.float32)
_HAS_MIN = _by_type(False, np.bool_, dict.fromkeys((_Q4_1, _Q5_1, _Q2_K, _Q4_K, _Q5_K), True))
_IQ2_XXS_GRID, _IQ2_XS_GRID, _IQ2_S_GRID = map(grid_of, ("IQ2_XXS", "IQ2_XS", "IQ2_S"))
_IQ3_XXS_GRID, _IQ3_S_GRID, _IQ1_GRID = map(grid_of, ("IQ3_XXS", "IQ3_S", "IQ1_S"))
_OF_IQ1 = 6  # IQ2_VALUES from there on are those of IQ1


@njit(nogil=True, cache=True)
def _half(block, at):
    """The float16 at a byte, as float32."""
    return float32_of(uint16(int32(block[at]) | (int32(block[at + 1]) << 8)))


@njit(nogil=True, cache=True)
def _scale_and_min(block, at, group):
    """The 6-bit scale and minimum of a group of Q4_K and Q5_K, from 12 bytes."""
    if group < 4:
        return int32(block[at + group] & 63), int32(block[at + 4 + group] & 63)
    low = block[at + 4 + group]
    high_scale, high_min = block[at + group - 4] >> 6, block[at + group] >> 6
    return int32((low & 15) | (high_scale << 4)), int32((low >> 4) | (high_min << 4))


@njit(nogil=True, cache=True, inline="always")
def _scale_bits(code, block):
    """A block's float16 scale, of a type with one."""
    if code == _IQ1_M:  # four bits beside each group of scales
        bits = int32(0)
        for i in range(4):
            bits |= int32(block[49 + 2 * i] >> 4) << (4 * i)
        return uint16(bits)
    return uint16(_word(block, _SCALE_AT[code]))


@njit(nogil=True, cache=True)
def _block_scale(code, block):
    """A block's scale times the unit of its values, float32."""
    if code == _NVFP4 and block.shape[0] > _NVFP4_BYTES:
        low, high = _word(block, _NVFP4_BYTES), _word(block, _NVFP4_BYTES + 2)
        return float32_from_bits(uint32(low) | (uint32(high) << uint32(16)))
    if code in (_MXFP4, _NVFP4):
        return float32(1)
    scale = float32_of(_scale_bits(code, block))
    return scale * _UNITS[_TABLES[code]] if _TABLES[code] >= 0 else scale


@njit(nogil=True, cache=True, inline="always")
def _scale(code, number):
    """What a group's, or a half's, small integer stands for."""
    if code == _MXFP4:
        return power_of_two(uint8(number))
    if code == _NVFP4:  # of E4M3, half as large
        return float32_from_bits(uint32(number) << uint32(20)) * float32(2.0**119)
    return float32(number)


@njit(nogil=True, cache=True, inline="always")
def _minima(code, block, part):
    """Small integers of both halves; 0 of types without minima."""
    if code in (_Q4_K, _Q5_K):
        _, least = _scale_and_min(block, 4, part)
        return least, least
    if code == _Q2_K:
        return int32(block[2 * part] >> 4), int32(block[2 * part + 1] >> 4)
    least = int32(-1) if _HAS_MIN[code] else int32(0)  # Q4_1's and Q5_1's are added
    return least, least


@njit(nogil=True, cache=True, inline="always")
def _group(code, block, part, codes):
    """Numbers of the values of a group of 32 weights; returns its halves' scales, whole numbers."""
    one = int32(1)
    if code in (_Q4_K, _Q5_K):
        return _k_group(code, block, part, codes)
    if code == _Q6_K:
        low, shift = block[64 * (part // 4) + part % 2 * 32 :], part % 4 // 2 * 4
        high, above = block[128 + 32 * (part // 4) :], part % 4 * 2
        for k in range(32):
            codes[k] = uint8((low[k] >> shift) & 15 | (((high[k] >> above) & 3) << 4))
        return int32(int8(block[192 + 2 * part])), int32(int8(block[193 + 2 * part]))
    if _NIBBLES_AT[code]:
        _nibbles(block, _NIBBLES_AT[code], _FIFTHS_AT[code], codes)
        return (int32(block[0]), int32(block[0])) if code == _MXFP4 else (one, one)
    if code in (_Q8_0, _NF4):
        for k in range(32):
            codes[k] = block[2 + k]
        return one, one
    if code == _Q2_K:
        _pairs(block, 16, part, codes)
        return int32(block[2 * part] & 15), int32(block[2 * part + 1] & 15)
    if code == _Q3_K:
        _pairs(block, 32, part, codes)
        for k in range(32):
            codes[k] |= uint8(((block[k] >> part) & 1) << 2)
        return _q3_scale(block, 2 * part), _q3_scale(block, 2 * part + 1)
    if code in (_TQ1_0, _TQ2_0, _Q1_0, _Q2_0):
        _few_bits(code, block, part, codes)
        return one, one
    if code == _NVFP4:
        return _nvfp4_group(block, part, codes)
    if code == _IQ4_XS:
        _nibbles(block, 8 + 16 * part, 0, codes)
        low = int32(block[4 + part // 2] >> (part % 2 * 4)) & 15
        scale = (low | (((_word(block, 2) >> (2 * part)) & 3) << 4)) - 32
        return scale, scale
    if code in (_IQ3_XXS, _IQ3_S):
        return _iq3_group(code, block, part, codes)
    if code in (_IQ1_S, _IQ1_M):
        return _iq1_group(code, block, part, codes)
    return _iq2_group(code, block, part, codes)


@njit(nogil=True, cache=True, inline="always")
def _nibbles(block, at, bits_at, codes):
    """16 bytes of two numbers; `bits_at` says where fifth bits are, 0: nowhere."""
    pairs = block[at:]
    for k in range(16):
        codes[k], codes[k + 16] = pairs[k] & uint8(15), pairs[k] >> uint8(4)
    if bits_at:
        fifths = block[bits_at:]
        for k in range(32):
            codes[k] |= uint8(((fifths[k // 8] >> (k % 8)) & 1) << 4)


@njit(nogil=True, cache=True)
def _pairs(block, at, part, codes):
    """Two bits of each of 32 bytes, which four groups share."""
    pairs, shift = block[at + part // 4 * 32 :], part % 4 * 2
    for k in range(32):
        codes[k] = uint8((pairs[k] >> shift) & 3)


@njit(nogil=True, cache=True, inline="always")
def _k_group(code, block, part, codes):
    """Of Q4_K and Q5_K."""
    nibbles, shift = block[(16 if code == _Q4_K else 48) + part // 2 * 32 :], part % 2 * 4
    for k in range(32):
        codes[k] = uint8((nibbles[k] >> shift) & 15)
    if code == _Q5_K:
        for k in range(32):
            codes[k] |= uint8(((block[16 + k] >> part) & 1) << 4)
    scale, _ = _scale_and_min(block, 4, part)
    return scale, scale


@njit(nogil=True, cache=True)
def _few_bits(code, block, part, codes):
    """Of ternary types, and those of one and two bits; without a sign 1 bit is 0 or 2."""
    if code == _TQ2_0:
        _pairs(block, 0, part, codes)
        return
    for k in range(32):
        if code == _TQ1_0:
            codes[k] = uint8(_trit(block, part, k))
        elif code == _Q1_0:
            codes[k] = uint8(((block[2 + 4 * part + k // 8] >> (k % 8)) & 1) << 1)
        else:
            codes[k] = uint8((block[2 + 8 * part + k // 4] >> (k % 4 * 2)) & 3)


@njit(nogil=True, cache=True)
def _nvfp4_group(block, part, codes):
    """Scales are E4M3 without a sign; what would be NaN is 0."""
    pairs = block[4 + 16 * part :]
    for half in range(2):
        for k in range(8):
            byte = pairs[8 * half + k]
            codes[16 * half + k], codes[16 * half + 8 + k] = byte & uint8(15), byte >> uint8(4)
    first, second = int32(block[2 * part]), int32(block[2 * part + 1])
    return 0 if first == 0x7F else first & 0x7F, 0 if second == 0x7F else second & 0x7F


@njit(nogil=True, cache=True)
def _trit(block, part, k):
    """Weight k of a part of TQ1_0, plus one: a byte's digits to the base 3 are 256ths."""
    weight = 32 * part + k
    if weight < 160:
        byte, digit = block[k], part
    elif weight < 240:
        byte, digit = block[32 + k % 16], (weight - 160) // 16
    else:
        byte, digit = block[48 + k % 4], (weight - 240) // 4
    shifted = int32(byte)
    for _ in range(digit):
        shifted = (shifted * 3) & 255
    return shifted * 3 >> 8


@njit(nogil=True, cache=True)
def _eight_signs(number):
    """Seven signs, and an eighth that makes their number even."""
    parity = number
    for shift in (4, 2, 1):
        parity ^= parity >> shift
    return number | ((parity & 1) << 7)


@njit(nogil=True, cache=True, inline="always")
def _word(block, at):
    """Two bytes as a number."""
    return int32(block[at]) | (int32(block[at + 1]) << 8)


@njit(nogil=True, cache=True)
def _q3_scale(block, half):
    """The scale of 16 weights of Q3_K: six bits, of which two lie apart."""
    low = (block[96 + half % 8] >> (half // 8 * 4)) & 15
    high = (block[104 + half % 4] >> (half // 4 * 2)) & 3
    return int32(low | (high << 4)) - 32


@njit(nogil=True, cache=True)
def _iq3_group(code, block, part, codes):
    more = 66 + 4 * part  # of IQ3_XXS: 4 times 7 signs, and a scale
    packed = uint32(_word(block, more)) | (uint32(_word(block, more + 2)) << uint32(16))
    for run in range(8):
        place = int32(block[2 + 8 * part + run])
        if code == _IQ3_S:
            place |= ((int32(block[66 + part]) >> run) & 1) << 8
            signs = int32(block[74 + 4 * part + run // 2])
            digits = _IQ3_S_GRID[place]
        else:
            signs = _eight_signs(int32((packed >> uint32(run // 2 * 7)) & uint32(127)))
            digits = _IQ3_XXS_GRID[place]
        for k in range(4):
            sign = (signs >> (run % 2 * 4 + k)) & 1
            codes[4 * run + k] = uint8(digits[k] + 8 * sign)
    scale = int32(packed >> uint32(28))
    if code == _IQ3_S:
        scale = int32(block[106 + part // 2] >> (part % 2 * 4)) & 15
    return 2 * scale + 1, 2 * scale + 1


@njit(nogil=True, cache=True)
def _iq2_group(code, block, part, codes):
    more = 6 + 8 * part  # of IQ2_XXS: 4 times 7 signs, and a scale
    packed = uint32(_word(block, more)) | (uint32(_word(block, more + 2)) << uint32(16))
    for run in range(4):
        if code == _IQ2_XXS:
            signs = _eight_signs(int32((packed >> uint32(run * 7)) & uint32(127)))
            digits = _IQ2_XXS_GRID[int32(block[2 + 8 * part + run])]
        elif code == _IQ2_XS:
            both = _word(block, 2 + 8 * part + 2 * run)
            signs, digits = _eight_signs(int32(both >> 9)), _IQ2_XS_GRID[both & 511]
        else:
            top = (int32(block[66 + part]) >> (2 * run)) & 3
            signs = int32(block[34 + 4 * part + run])
            digits = _IQ2_S_GRID[int32(block[2 + 4 * part + run]) | (top << 8)]
        for k in range(8):
            codes[8 * run + k] = uint8(digits[k] + 3 * ((signs >> k) & 1))
    if code == _IQ2_XXS:
        scale = 2 * int32(packed >> uint32(28)) + 1
        return scale, scale
    both = int32(block[(66 if code == _IQ2_XS else 74) + part])
    return 2 * (both & 15) + 1, 2 * (both >> 4) + 1


@njit(nogil=True, cache=True)
def _iq1_group(code, block, part, codes):
    for run in range(4):
        if code == _IQ1_S:
            top = _word(block, 34 + 2 * part)
            is_less, top = top >> 15, (top >> (3 * run)) & 7
        else:
            top = int32(block[32 + 2 * part + run // 2]) >> (run % 2 * 4)
            is_less, top = (top >> 3) & 1, top & 7
        digits = _IQ1_GRID[int32(block[4 * part + run + (2 if code == _IQ1_S else 0)]) | (top << 8)]
        for k in range(8):
            codes[8 * run + k] = uint8(digits[k] + _OF_IQ1 + 3 * is_less)
    if code == _IQ1_S:
        scale = 2 * ((_word(block, 34 + 2 * part) >> 12) & 7) + 1
        return scale, scale
    both = _word(block, 48 + part // 2 * 2) >> (part % 2 * 6)
    return 2 * (both & 7) + 1, 2 * ((both >> 3) & 7) + 1


@njit(nogil=True, cache=True, _nrt=True)
def dequantize_kernel(code, weights, num_bytes, src, src_step, row_ids, first_block, out):
    """out[i] = values of the row row_ids[i] of `src` from block `first_block` on; checks nothing.

    `src` is flat uint8, its rows so many bytes apart; out (N, W), W a multiple of `weights`.
    """
    codes = np.empty(_GROUP, np.uint8)
    for i in range(row_ids.shape[0]):
        start = row_ids[i] * src_step + first_block * num_bytes
        _dequantize_row(code, weights, num_bytes, src, start, codes, out[i])


@njit(nogil=True, cache=True)
def _dequantize_row(code, weights, num_bytes, src, start, codes, out):
    table, offset = _TABLES[code], _OFFSETS[code]
    for number in range(out.shape[0] // weights):
        block = src[start + number * num_bytes :][:num_bytes]
        scale = _block_scale(code, block)
        least = _half(block, _SCALE_AT[code] + 2) if _HAS_MIN[code] else float32(0)
        for part in range(weights // _GROUP):
            scales = _group(code, block, part, codes)
            minima = _minima(code, block, part)
            for half in range(2):
                values = out[number * weights + part * _GROUP + 16 * half :][:16]
                d, m = scale * _scale(code, scales[half]), least * float32(minima[half])
                if table >= 0:
                    for k in range(16):
                        values[k] = d * float32(_VALUES[table, codes[16 * half + k]])
                else:
                    for k in range(16):
                        values[k] = d * float32(int32(int8(codes[16 * half + k])) - offset) - m


@njit(nogil=True, cache=True, inline="always")
def _store_halves(first, second, factors, group, num_groups):
    """Lay the small integers of a group's halves into a row."""
    begin = group // _CHUNK_GROUPS * _CHUNK_GROUPS
    factors[begin + group] = uint8(first)
    factors[begin + group + min(_CHUNK_GROUPS, num_groups - begin)] = uint8(second)


@njit(nogil=True, cache=True, inline="always")
def _store_six_bits(scale, least, factors, group, num_groups):
    """Lay a group's scale and minimum, 0..63, into a row of Q4_K or Q5_K."""
    first = group // _CHUNK_GROUPS * _CHUNK_GROUPS
    lanes = min(_CHUNK_GROUPS, num_groups - first)
    of_chunk, lane = factors[first // 2 * 3 :], group - first
    of_chunk[lane] = (scale & 15) | ((least & 15) << 4)
    upper, place = (scale >> 4) | (least >> 4 << 2), lanes + lane % (lanes // 2)
    of_chunk[place] = upper if lane < lanes // 2 else of_chunk[place] | (upper << 4)


@njit(nogil=True, cache=True, inline="always")
def _store_block_scale(bits, factors, number):
    """Lay a float16 into a row; returns DONE or NOT_FINITE."""
    factors[2 * number], factors[2 * number + 1] = bits & 255, bits >> 8
    return NOT_FINITE if bits & 0x7C00 == 0x7C00 else DONE


@njit(nogil=True, cache=True)
def _store_rounded(code, block, scale, least, factors, group, num_groups):
    """Lay a group's scale and minimum as float16 into a row of Q4_1."""
    d = _half(block, 0) * _scale(code, scale)
    m = -(_half(block, 2) * float32(least))
    store_half(factors, group, d)
    store_half(factors, num_groups + group, m)
    return DONE if abs(d) <= _LARGEST_HALF and abs(m) <= _LARGEST_HALF else DOES_NOT_FIT


@njit(nogil=True, cache=True, inline="always")
def _store_of_block(layout, code, block, blocks, number):
    """Lay what groups of a block share into a row; returns a status."""
    if layout == _E4M3S:
        at = blocks[4 * number :]
        at[0], at[1], at[2], at[3] = 0, 0, 0x80, 0x3F  # 1
        for k in range(block.shape[0] - _NVFP4_BYTES):
            at[k] = block[_NVFP4_BYTES + k]
        return NOT_FINITE if at[3] & 0x7F == 0x7F and at[2] & 0x80 else DONE
    if layout == _SIX_BITS:  # ggml subtracts the minimum
        least = uint16(_word(block, 2) ^ 0x8000)
        worst = _store_block_scale(_scale_bits(code, block), blocks, 2 * number)
        return max(worst, _store_block_scale(least, blocks, 2 * number + 1))
    return _store_block_scale(_scale_bits(code, block), blocks, number)


@njit(nogil=True, cache=True, _nrt=True)
def repack_kernel(code, weights, num_bytes, src, src_step, row_ids, dst, dst_step, width, row_code):
    """Blocks as rows that hold their numbers, and factors to the bit or, of MINIMA, as float16.

    row_code: bits, offset, whether halves have scales, number in `FACTORS`, bytes of small integers
    Returns DONE, NOT_FINITE, or DOES_NOT_FIT, which leave `dst` unspecified; checks no shapes.
    """
    codes, worst = np.empty(_GROUP, np.uint8), DONE
    for row in range(row_ids.shape[0]):
        start, target = row_ids[row] * src_step, dst[row * dst_step :]
        worst = max(
            worst, _repack_row(code, weights, num_bytes, src, start, codes, target, width, row_code)
        )
    return worst


@njit(nogil=True, cache=True)
def _repack_row(code, weights, num_bytes, src, start, codes, target, width, row_code):
    bits, offset, has_halves, layout, small_bytes = row_code
    num_groups, in_block, worst = width // _GROUP, weights // _GROUP, DONE
    table, shift = _TABLES[code], uint8(offset - _OFFSETS[code])
    factors = target[width * bits // 8 :]
    blocks = factors[small_bytes:]
    for group in range(num_groups):
        number, part = group // in_block, group % in_block
        block = src[start + number * num_bytes :][:num_bytes]
        first, second = _group(code, block, part, codes)
        if bits == 8 and table >= 0:
            for k in range(_GROUP):
                codes[k] = uint8(_VALUES[table, codes[k]])
        elif shift:
            for k in range(_GROUP):
                codes[k] += shift
        store_codes(bits, has_halves, codes, target, group, num_groups)
        status = DONE
        if layout == _SCALES:
            status = _store_block_scale(_scale_bits(code, block), factors, group)
        elif layout == _EXPONENTS:
            factors[group] = uint8(first)
            status = NOT_FINITE if first > _MAX_EXPONENT else DONE
        elif layout == _MINIMA:
            least, _ = _minima(code, block, part)
            status = _store_rounded(code, block, first, least, factors, group, num_groups)
        else:
            if layout == _SIX_BITS:
                least, _ = _minima(code, block, part)
                _store_six_bits(first, least, factors, group, num_groups)
            elif layout == _INT8S:
                factors[group] = uint8(first)
            else:
                _store_halves(first, second, factors, group, num_groups)
            if part == 0:
                status = _store_of_block(layout, code, block, blocks, number)
        worst = max(worst, status)
    return worst


@njit(nogil=True, cache=True)
def paired_blocks_kernel(values, scales, row_ids, first_group, out):
    """Rows of MXFP4 as blocks of it; checks no shapes.

    values (R, G, 16) uint8, of which each holds weights 2 j (low) and 2 j + 1; scales (R, G) uint8
    out (N, 17 g): groups first_group to first_group + g - 1 of the rows `row_ids`
    """
    for i in range(row_ids.shape[0]):
        row, target = row_ids[i], out[i]
        for group in range(target.shape[0] // 17):
            pairs, block = values[row, first_group + group], target[17 * group : 17 * group + 17]
            block[0] = scales[row, first_group + group]
            for k in range(8):
                even, odd = pairs[k], pairs[k + 8]
                block[1 + 2 * k] = even & uint8(15) | uint8(odd << uint8(4))
                block[2 + 2 * k] = even >> uint8(4) | odd & uint8(0xF0)
