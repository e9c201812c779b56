"""Compiled loops over ggml's blocks: values in float32, and codes that our rows take as they are.

Source:  ggml-quants.c, dequantize_row_*; ggml-common.h, the blocks' layouts
"""

import numpy as np
from numba import float32, int8, int32, uint8, uint16

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.formats import (
    BLOCK_FORMATS,
    CHUNK_GROUPS,
    E2M1_VALUES,
    MAX_EXPONENT,
    QUANT_GROUP,
    block_dtype,
)
from hotcold.numba_kernels.ir.bit_ir import float32_of
from hotcold.numba_kernels.load.quantize_kernels import (
    DONE,
    NOT_FINITE,
    power_of_two,
    store_codes,
    store_half,
    store_q4,
    store_q6,
)

# What `repack_kernel` returns for codes that no row of Q8 has: -128.
DOES_NOT_FIT = 3
_LARGEST_HALF = np.float32(65504)


def _code(name):
    return BLOCK_FORMATS[block_dtype(name)].ggml_type


_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0 = (
    _code(f"Q{name}") for name in ("4_0", "4_1", "5_0", "5_1", "8_0")
)
_Q2_K, _Q3_K, _Q4_K, _Q5_K, _Q6_K = (_code(f"Q{bits}_K") for bits in (2, 3, 4, 5, 6))
_IQ4_NL, _MXFP4 = _code("IQ4_NL"), _code("MXFP4")
_VALUES, _MAX_EXPONENT = np.array(E2M1_VALUES, np.int8), np.uint8(MAX_EXPONENT)
_IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
_GROUP, _CHUNK_GROUPS = np.int64(QUANT_GROUP), np.int64(CHUNK_GROUPS)


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


@njit(nogil=True, cache=True)
def _with_min(block, nibbles, bits_at, out):
    """Q4_1, and Q5_1 where `bits_at` says where fifth bits are: d * q + m."""
    scale, least = _half(block, 0), _half(block, 2)
    for k in range(16):
        low, high = int32(block[nibbles + k] & 15), int32(block[nibbles + k] >> 4)
        if bits_at:
            low |= ((int32(block[bits_at + k // 8]) >> (k % 8)) & 1) << 4
            high |= ((int32(block[bits_at + 2 + k // 8]) >> (k % 8)) & 1) << 4
        out[k] = scale * float32(low) + least
        out[k + 16] = scale * float32(high) + least


@njit(nogil=True, cache=True)
def _q2_k(block, out):
    scale, least = _half(block, 80), _half(block, 82)
    for part in range(16):
        d = scale * float32(block[part] & 15)
        m = least * float32(block[part] >> 4)
        first, shift = 16 + part // 8 * 32 + part % 2 * 16, part % 8 // 2 * 2
        for k in range(16):
            out[16 * part + k] = d * float32((block[first + k] >> shift) & 3) - m


@njit(nogil=True, cache=True)
def _q3_k(block, out):
    scale = _half(block, 108)
    for part in range(16):
        low = (block[96 + part % 8] >> (part // 8 * 4)) & 15
        high = (block[104 + part % 4] >> (part // 4 * 2)) & 3
        d = scale * float32(int32(low | (high << 4)) - 32)
        first, shift = 32 + part // 8 * 32 + part % 2 * 16, part % 8 // 2 * 2
        for k in range(16):
            has_high = (block[part % 2 * 16 + k] >> (part // 2)) & 1
            q = int32((block[first + k] >> shift) & 3) - (0 if has_high else 4)
            out[16 * part + k] = d * float32(q)


@njit(nogil=True, cache=True)
def _q4_k(block, out):
    scale, least = _half(block, 0), _half(block, 2)
    for group in range(8):
        factor, offset = _scale_and_min(block, 4, group)
        d, m = scale * float32(factor), least * float32(offset)
        first, shift = 16 + group // 2 * 32, group % 2 * 4
        for k in range(32):
            out[32 * group + k] = d * float32((block[first + k] >> shift) & 15) - m


@njit(nogil=True, cache=True)
def _q5_k(block, out):
    scale, least = _half(block, 0), _half(block, 2)
    for group in range(8):
        factor, offset = _scale_and_min(block, 4, group)
        d, m = scale * float32(factor), least * float32(offset)
        first, shift = 48 + group // 2 * 32, group % 2 * 4
        for k in range(32):
            q = ((block[first + k] >> shift) & 15) | (((block[16 + k] >> group) & 1) << 4)
            out[32 * group + k] = d * float32(q) - m


@njit(nogil=True, cache=True)
def _q6_k(block, out):
    scale = _half(block, 208)
    for part in range(16):
        d = scale * float32(int8(block[192 + part]))
        half, row, side = part // 8, part % 8 // 2, part % 2 * 16
        low, shift = 64 * half + row % 2 * 32 + side, row // 2 * 4
        high = 128 + 32 * half + side
        for k in range(16):
            q = ((block[low + k] >> shift) & 15) | (((block[high + k] >> (2 * row)) & 3) << 4)
            out[16 * part + k] = d * float32(int32(q) - 32)


@njit(nogil=True, cache=True)
def _mxfp4(block, out):
    scale = power_of_two(block[0])
    for k in range(16):
        out[k] = scale * float32(_VALUES[block[1 + k] & 15])
        out[k + 16] = scale * float32(_VALUES[block[1 + k] >> 4])


@njit(nogil=True, cache=True)
def _codes(code, block, codes):
    """The 32 codes, int8 bits, of a block of Q4_0, Q5_0, Q8_0 or IQ4_NL: weight = scale * code."""
    if code == _Q8_0:
        for k in range(32):
            codes[k] = block[2 + k]
        return
    nibbles = 6 if code == _Q5_0 else 2
    for k in range(16):
        low, high = int32(block[nibbles + k] & 15), int32(block[nibbles + k] >> 4)
        if code == _Q4_0:
            low, high = low - 8, high - 8
        elif code == _Q5_0:
            low |= ((int32(block[2 + k // 8]) >> (k % 8)) & 1) << 4
            high |= ((int32(block[4 + k // 8]) >> (k % 8)) & 1) << 4
            low, high = low - 16, high - 16
        else:
            low, high = int32(_IQ4_VALUES[low]), int32(_IQ4_VALUES[high])
        codes[k], codes[k + 16] = uint8(low), uint8(high)


@njit(nogil=True, cache=True)
def _values(code, block, codes, out):
    """out = the weights of one block."""
    if code == _Q4_K:
        _q4_k(block, out)
    elif code == _Q6_K:
        _q6_k(block, out)
    elif code == _Q5_K:
        _q5_k(block, out)
    elif code == _Q4_1:
        _with_min(block, 4, 0, out)
    elif code == _Q5_1:
        _with_min(block, 8, 4, out)
    elif code == _Q3_K:
        _q3_k(block, out)
    elif code == _Q2_K:
        _q2_k(block, out)
    elif code == _MXFP4:
        _mxfp4(block, out)
    else:
        _codes(code, block, codes)
        scale = _half(block, 0)
        for k in range(32):
            out[k] = scale * float32(int8(codes[k]))


@njit(nogil=True, cache=True, _nrt=True)
def dequantize_kernel(code, weights, num_bytes, src, src_step, row_ids, first_block, out):
    """out[i] = values of the row row_ids[i] of `src` from block `first_block` on; checks nothing.

    `src` is flat uint8, its rows so many bytes apart; out (N, W), W a multiple of `weights`.
    """
    codes = np.empty(_GROUP, np.uint8)
    for i in range(row_ids.shape[0]):
        start = row_ids[i] * src_step + first_block * num_bytes
        row = out[i]
        for block in range(row.shape[0] // weights):
            _values(
                code, src[start : start + num_bytes], codes,
                row[block * weights : (block + 1) * weights],
            )  # fmt: skip
            start += num_bytes


@njit(nogil=True, cache=True, _nrt=True)
def repack_kernel(code, num_bytes, src, src_step, row_ids, dst, dst_step, width, bits):
    """Blocks of Q4_0, Q5_0, Q8_0 or IQ4_NL as rows of Q8, to the bit; Q4_0 also as Q4, Q5_0 as Q5.

    Returns DONE, NOT_FINITE or DOES_NOT_FIT, which leave `dst` unspecified; checks no shapes.
    """
    codes = np.empty(_GROUP, np.uint8)
    num_groups, worst = width // _GROUP, DONE
    for row in range(row_ids.shape[0]):
        start = row_ids[row] * src_step
        target = dst[row * dst_step :]
        scales = target[width * bits // 8 :]
        for group in range(num_groups):
            block = src[start : start + num_bytes]
            start += num_bytes
            _codes(code, block, codes)
            if block[1] & 0x7C == 0x7C:
                worst = max(worst, NOT_FINITE)
            scales[2 * group], scales[2 * group + 1] = block[0], block[1]
            if bits < 8:
                for k in range(_GROUP):
                    codes[k] += uint8(1 << (bits - 1))
            else:
                for k in range(_GROUP):
                    if codes[k] == 0x80:
                        worst = max(worst, DOES_NOT_FIT)
            store_codes(bits, codes, target, group, num_groups)
    return worst


@njit(nogil=True, cache=True, _nrt=True)
def repack_q6_kernel(num_bytes, src, src_step, row_ids, dst, dst_step, width):
    """Blocks of Q6_K as rows of Q6, to the bit. Returns DONE or NOT_FINITE; checks no shapes."""
    codes = np.empty(_GROUP, np.uint8)
    num_groups, worst = width // _GROUP, DONE
    for row in range(row_ids.shape[0]):
        start = row_ids[row] * src_step
        target = dst[row * dst_step :]
        scales = target[width // 8 * 6 :]
        blocks = scales[2 * num_groups :]
        for group in range(num_groups):
            number, part = group // 8, group % 8
            block = src[start + number * num_bytes :][:num_bytes]
            low, shift = 64 * (part // 4) + part % 2 * 32, part % 4 // 2 * 4
            high = 128 + 32 * (part // 4)
            for k in range(_GROUP):
                top = (block[high + k] >> (part % 4 * 2)) & 3
                codes[k] = uint8((block[low + k] >> shift) & 15 | (top << 4))
            store_q6(codes, target, group, num_groups)
            first = group // _CHUNK_GROUPS * _CHUNK_GROUPS
            lanes = min(_CHUNK_GROUPS, num_groups - first)
            for half in range(2):
                place = 2 * first + half * lanes + group - first
                scales[place] = block[192 + 2 * part + half]
            if part == 0:
                blocks[2 * number], blocks[2 * number + 1] = block[208], block[209]
                if block[209] & 0x7C == 0x7C:
                    worst = NOT_FINITE
    return worst


@njit(nogil=True, cache=True, _nrt=True)
def repack_k_kernel(bits, num_bytes, src, src_step, row_ids, dst, dst_step, width):
    """Blocks of Q4_K as rows of Q4_K, or of Q5_K as Q5_K, to the bit.

    A block's minimum, which ggml subtracts, is negated.
    Returns DONE or NOT_FINITE; checks no shapes.
    """
    codes = np.empty(_GROUP, np.uint8)
    num_groups, worst = width // _GROUP, DONE
    for row in range(row_ids.shape[0]):
        start = row_ids[row] * src_step
        target = dst[row * dst_step :]
        factors = target[width * bits // 8 :]
        blocks = factors[num_groups // 2 * 3 :]
        for group in range(num_groups):
            number, part = group // 8, group % 8
            block = src[start + number * num_bytes :][:num_bytes]
            nibbles, shift = (16 if bits == 4 else 48) + part // 2 * 32, part % 2 * 4
            for k in range(_GROUP):
                codes[k] = (block[nibbles + k] >> shift) & 15
            if bits == 5:
                for k in range(_GROUP):
                    codes[k] |= uint8(((block[16 + k] >> part) & 1) << 4)
            store_codes(bits, codes, target, group, num_groups)
            first = group // _CHUNK_GROUPS * _CHUNK_GROUPS
            lanes = min(_CHUNK_GROUPS, num_groups - first)
            of_chunk, lane = factors[first // 2 * 3 :], group - first
            scale, least = _scale_and_min(block, 4, part)
            of_chunk[lane] = (scale & 15) | ((least & 15) << 4)
            upper, place = (scale >> 4) | (least >> 4 << 2), lanes + lane % (lanes // 2)
            of_chunk[place] = upper if lane < lanes // 2 else of_chunk[place] | (upper << 4)
            if part == 0:
                blocks[4 * number], blocks[4 * number + 1] = block[0], block[1]
                blocks[4 * number + 2], blocks[4 * number + 3] = block[2], block[3] ^ 0x80
                if block[1] & 0x7C == 0x7C or block[3] & 0x7C == 0x7C:
                    worst = NOT_FINITE
    return worst


@njit(nogil=True, cache=True, _nrt=True)
def repack_mxfp4_kernel(num_bytes, src, src_step, row_ids, dst, dst_step, width):
    """Blocks of MXFP4 as rows of it, to the bit. Returns DONE or NOT_FINITE; checks no shapes."""
    codes = np.empty(_GROUP, np.uint8)
    num_groups, worst = width // _GROUP, DONE
    for row in range(row_ids.shape[0]):
        start = row_ids[row] * src_step
        target = dst[row * dst_step :]
        exponents = target[width // 2 :]
        for group in range(num_groups):
            block = src[start : start + num_bytes]
            start += num_bytes
            for k in range(16):
                codes[k], codes[k + 16] = block[1 + k] & 15, block[1 + k] >> 4
            store_q4(codes, target, group, num_groups)
            exponents[group] = block[0]
            if block[0] > _MAX_EXPONENT:
                worst = NOT_FINITE
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


@njit(nogil=True, cache=True, _nrt=True)
def repack_with_min_kernel(code, num_bytes, src, src_step, row_ids, dst, dst_step, width):
    """Blocks of Q4_1 or Q4_K as rows of Q4_1: values stay, and Q4_1's scales and minima.

    Those of Q4_K, products of a float16 and 6 bits, are rounded to float16.
    Returns DONE, or DOES_NOT_FIT, which leaves `dst` unspecified; checks no shapes.
    """
    codes = np.empty(_GROUP, np.uint8)
    num_groups, worst = width // _GROUP, DONE
    groups_a_block = 8 if code == _Q4_K else 1
    for row in range(row_ids.shape[0]):
        first = row_ids[row] * src_step
        target = dst[row * dst_step :]
        factors = target[width // 2 :]
        for group in range(num_groups):
            block = src[first + group // groups_a_block * num_bytes :][:num_bytes]
            scale, least = _half(block, 0), _half(block, 2)
            if code == _Q4_K:
                part = group % 8
                factor, offset = _scale_and_min(block, 4, part)
                scale, least = scale * float32(factor), -(least * float32(offset))
                nibbles, shift = 16 + part // 2 * 32, part % 2 * 4
                for k in range(_GROUP):
                    codes[k] = (block[nibbles + k] >> shift) & 15
            else:
                for k in range(16):
                    codes[k], codes[k + 16] = block[4 + k] & 15, block[4 + k] >> 4
            if not (abs(scale) <= _LARGEST_HALF and abs(least) <= _LARGEST_HALF):
                worst = DOES_NOT_FIT
            store_half(factors, group, scale)
            store_half(factors, num_groups + group, least)
            store_q4(codes, target, group, num_groups)
    return worst
