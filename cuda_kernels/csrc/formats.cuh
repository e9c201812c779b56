// Readers of weight rows, in the layouts of numba_kernels/formats.py.
//
// A piece is 16 bytes, what a lane reads at once. With VECTOR every row is aligned to 16 bytes and
// has whole pieces (quantized: a multiple of 256 weights, so that the last chunk has 8 or 16
// groups). Without it items are read one by one, with the same columns in the same lanes, so sums
// have the same order.
#pragma once
#include "common.cuh"

SHARED_CONSTANT int QUARTER = 4;  // groups with a word each in a 16-byte piece

DEVICE constexpr bool is_quantized(int format) { return codes_of(format) != FLOAT_CODES; }
DEVICE constexpr bool has_bytes(int format) { return codes_of(format) == BYTES_CODES; }
DEVICE constexpr bool has_fifths(int format) { return codes_of(format) == FIFTHS_CODES; }
DEVICE constexpr bool has_exponents(int format) { return factors_of(format) == EXPONENTS_FACTORS; }
DEVICE constexpr bool has_int8s(int format) { return factors_of(format) == INT8S_FACTORS; }
DEVICE constexpr bool has_e4m3s(int format) { return factors_of(format) == E4M3S_FACTORS; }
DEVICE constexpr bool has_six_bits(int format) { return factors_of(format) == SIX_BITS_FACTORS; }
DEVICE constexpr int items_of(int format) { return 128 / bits_of(format); }  // of a float piece
// Words of a group, but for what stands above nibbles, and the values of each.
DEVICE constexpr int steps_of(int format) { return has_bytes(format) ? 8 : 4; }
DEVICE constexpr int values_of(int format) { return GROUP / steps_of(format); }

template <bool ONCE, typename T>
DEVICE T load_weights(const T* from) {
    if constexpr (ONCE) {
        return load_once(from);
    } else {
        return load(from);
    }
}

DEVICE u32 word_of(const uint4& piece, int place) {
    return place == 0 ? piece.x : place == 1 ? piece.y : place == 2 ? piece.z : piece.w;
}

DEVICE void set_word(uint4& piece, int place, u32 word) {
    (place == 0 ? piece.x : place == 1 ? piece.y : place == 2 ? piece.z : piece.w) = word;
}

// Four bytes at any address; rows of a byte a scale begin at odd ones, too.
DEVICE u32 load_bytes(const u8* from) {
    if (reinterpret_cast<unsigned long long>(from) & 1) {
        u32 word = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) word |= static_cast<u32>(load(from + i)) << 8 * i;
        return word;
    }
    const u16* halves = reinterpret_cast<const u16*>(from);
    return load(halves) | static_cast<u32>(load(halves + 1)) << 16;
}

// ---- float formats

// Weights k .. k + items_of - 1 of a row, zeros beyond its end.
template <int FORMAT, bool VECTOR, bool ONCE>
DEVICE uint4 float_piece(const u8* row, int k, int width) {
    if constexpr (VECTOR) {
        const u8* from = row + static_cast<i64>(k) * (16 / items_of(FORMAT));
        return load_weights<ONCE>(reinterpret_cast<const uint4*>(from));
    } else {
        uint4 piece = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < items_of(FORMAT); ++i) {
            if (k + i >= width) continue;
            if constexpr (FORMAT == F32) {
                set_word(piece, i, load(reinterpret_cast<const u32*>(row) + k + i));
            } else {
                u32 half = load(reinterpret_cast<const u16*>(row) + k + i);
                set_word(piece, i / 2, word_of(piece, i / 2) | half << 16 * (i % 2));
            }
        }
        return piece;
    }
}

template <int FORMAT>
DEVICE void widen_piece(const uint4& piece, float (&out)[items_of(FORMAT)]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 word = word_of(piece, i);
        if constexpr (FORMAT == F32) {
            out[i] = __uint_as_float(word);
        } else if constexpr (FORMAT == F16) {
            out[2 * i] = half_to_float(static_cast<u16>(word & 0xffff));
            out[2 * i + 1] = half_to_float(static_cast<u16>(word >> 16));
        } else {
            out[2 * i] = bfloat16_to_float(word);
            out[2 * i + 1] = __uint_as_float(word & 0xffff0000u);
        }
    }
}

// x[k .. k + N - 1], zeros beyond the end.
template <int N, bool VECTOR>
DEVICE void load_floats(const float* x, int k, int width, float (&out)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        if constexpr (VECTOR) {
            float4 four = load(reinterpret_cast<const float4*>(x + k + i));
            out[i] = four.x, out[i + 1] = four.y, out[i + 2] = four.z, out[i + 3] = four.w;
        } else {
#pragma unroll
            for (int j = i; j < i + 4; ++j) out[j] = k + j < width ? load(x + k + j) : 0.0f;
        }
    }
}

// ---- quantized formats

// Groups of chunk `chunk` in a row of `groups`.
DEVICE int chunk_size(int chunk, int groups) {
    return min_of(CHUNK_GROUPS, groups - chunk * CHUNK_GROUPS);
}

// Bytes of a row's values before those of a chunk, and of all its values.
template <int FORMAT>
DEVICE i64 value_bytes(i64 weights) {
    constexpr int BITS = bits_of(FORMAT), PART = BITS % 4 ? BITS % 2 ? 8 : 4 : BITS % 8 ? 2 : 1;
    return weights / PART * (BITS * PART / 8);
}

// A word of each of `valid` <= 4 adjacent groups, zeros for the others.
template <bool VECTOR, bool ONCE>
DEVICE uint4 quarter_piece(const u8* from, int valid) {
    if constexpr (VECTOR) {
        return load_weights<ONCE>(reinterpret_cast<const uint4*>(from));
    } else {
        uint4 piece = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int q = 0; q < QUARTER; ++q) {
            if (q < valid) set_word(piece, q, load_bytes(from + 4 * q));
        }
        return piece;
    }
}

// A row's scales, and its minima behind them.
template <int FORMAT>
DEVICE const u16* scales_of(const u8* row, int width) {
    return reinterpret_cast<const u16*>(row + value_bytes<FORMAT>(width));
}
template <int FORMAT>
DEVICE const u16* minima_of(const u8* row, int width) {
    return scales_of<FORMAT>(row, width) + width / GROUP;
}

// The scale (KIND 0) or the minimum (1) of a group: six bits that a block's float16 scales.
template <int FORMAT, int KIND>
DEVICE float six_bit_factor(const u8* row, int width, int group) {
    int groups = width / GROUP, chunk = group / CHUNK_GROUPS, lane = group % CHUNK_GROUPS;
    int size = chunk_size(chunk, groups), half = size / 2;
    const u8* factors = row + value_bytes<FORMAT>(width);
    const u16* blocks = reinterpret_cast<const u16*>(factors + groups / 2 * 3);
    const u8* own = factors + chunk * (CHUNK_GROUPS / 2 * 3);
    u32 low = load(own + lane), top = load(own + size + lane % half);
    u32 number = (low >> 4 * KIND & 15) | (top >> (4 * (lane / half) + 2 * KIND) & 3) << 4;
    float block = half_to_float(load(blocks + 2 * (group / block_groups_of(FORMAT)) + KIND));
    return block * static_cast<float>(number);
}

// 2 ^ (exponent - 128); the smallest two are subnormal numbers.
DEVICE float power_of_two(u32 exponent) {
    return __uint_as_float(exponent < 2 ? (exponent + 1) << 21 : (exponent - 1) << 23);
}

// An E4M3 number without its sign.
DEVICE float small_float(u32 bits) {
    return __uint_as_float((bits & 127) << 20) * 1.329227995784916e36f;  // 2^120
}

// An int8 or E4M3 scale in units, times its block's: number `place` of a row's, of a group.
template <int FORMAT>
DEVICE float small_scale(const u8* row, int width, int group, int place) {
    int groups = width / GROUP;
    const u8* scales = row + value_bytes<FORMAT>(width);
    const u8* blocks = scales + groups * (has_halves(FORMAT) ? 2 : 1);
    if constexpr (has_e4m3s(FORMAT)) {
        float block = __uint_as_float(load_bytes(blocks + 4 * (group / block_groups_of(FORMAT))));
        return small_float(load(scales + place)) * (block * unit_of(FORMAT));
    }
    const u16* own = reinterpret_cast<const u16*>(blocks) + group / block_groups_of(FORMAT);
    float number = static_cast<float>(static_cast<signed char>(load(scales + place)));
    return half_to_float(load(own)) * unit_of(FORMAT) * number;
}

// The scale of a group of a row, and its minimum: 0 where the format has none.
template <int FORMAT>
DEVICE float group_scale(const u8* row, int width, int group) {
    if constexpr (has_exponents(FORMAT)) {
        return power_of_two(load(row + value_bytes<FORMAT>(width) + group));
    }
    if constexpr (has_int8s(FORMAT)) return small_scale<FORMAT>(row, width, group, group);
    if constexpr (has_six_bits(FORMAT)) return six_bit_factor<FORMAT, 0>(row, width, group);
    return half_to_float(load(scales_of<FORMAT>(row, width) + group));
}
template <int FORMAT>
DEVICE float group_min(const u8* row, int width, int group) {
    if constexpr (!has_min(FORMAT)) return 0.0f;
    if constexpr (has_six_bits(FORMAT)) return six_bit_factor<FORMAT, 1>(row, width, group);
    return half_to_float(load(minima_of<FORMAT>(row, width) + group));
}

// The scales, or minima (KIND 1), of `valid` groups from `group` on, a multiple of four; zeros for
// the others.
template <int FORMAT, bool VECTOR, int KIND>
DEVICE void quarter_factors(
    const u8* row, int width, int group, int valid, float (&out)[QUARTER]) {
    const u16* factors = KIND ? minima_of<FORMAT>(row, width) : scales_of<FORMAT>(row, width);
    if constexpr (has_six_bits(FORMAT)) {
#pragma unroll
        for (int q = 0; q < QUARTER; ++q) {
            out[q] = q < valid ? six_bit_factor<FORMAT, KIND>(row, width, group + q) : 0.0f;
        }
    } else if constexpr (has_int8s(FORMAT)) {
#pragma unroll
        for (int q = 0; q < QUARTER; ++q) {
            out[q] = q < valid ? group_scale<FORMAT>(row, width, group + q) : 0.0f;
        }
    } else if constexpr (has_exponents(FORMAT)) {
        const u8* own = row + value_bytes<FORMAT>(width) + group;
#pragma unroll
        for (int q = 0; q < QUARTER; ++q) {
            out[q] = q < valid ? power_of_two(load(own + q)) : 0.0f;
        }
    } else if constexpr (VECTOR) {
        uint2 four = load(reinterpret_cast<const uint2*>(factors + group));
        out[0] = half_to_float(static_cast<u16>(four.x & 0xffff));
        out[1] = half_to_float(static_cast<u16>(four.x >> 16));
        out[2] = half_to_float(static_cast<u16>(four.y & 0xffff));
        out[3] = half_to_float(static_cast<u16>(four.y >> 16));
    } else {
#pragma unroll
        for (int q = 0; q < QUARTER; ++q) {
            out[q] = q < valid ? half_to_float(load(factors + group + q)) : 0.0f;
        }
    }
}

// The fifth bits of a word's low nibbles (half 0) or its high ones, above them: of steps 0 to 3.
DEVICE u32 upper_bits(u32 fifths, int step, int half) {
    return (fifths >> (2 * step + half) & 0x01010101u) << 4;
}

// The values that a word's low nibbles number, and its high ones, as signed bytes.
template <int FORMAT>
DEVICE void look_up(u32 word, u32& low, u32& high) {
    u32 numbers = word & 0x77777777u, which = 0x32103210u | (word & 0x88888888u) >> 1;
    u32 found[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 four = numbers >> 16 * half;
        u32 first = __byte_perm(table_0_of(FORMAT), table_4_of(FORMAT), four);
        u32 second = __byte_perm(table_8_of(FORMAT), table_12_of(FORMAT), four);
        found[half] = __byte_perm(first, second, which >> 16 * half);
    }
    low = __byte_perm(found[0], found[1], 0x6420), high = __byte_perm(found[0], found[1], 0x7531);
}

// A word's weights without scale and minimum: four bytes; else the four low nibbles, then the high
// ones.
template <int FORMAT>
DEVICE void word_values(u32 word, float (&out)[values_of(FORMAT)]) {
    u32 low = word ^ 0x80808080u, high = 0;
    if constexpr (has_table(FORMAT)) {
        look_up<FORMAT>(word, low, high);
        low ^= 0x80808080u, high ^= 0x80808080u;
    } else if constexpr (!has_bytes(FORMAT)) {
        low = word & 0x0f0f0f0fu, high = word >> 4 & 0x0f0f0f0fu;
    }
    constexpr bool IS_SIGNED = has_table(FORMAT) || has_bytes(FORMAT);
    constexpr float OFFSET = IS_SIGNED ? 128.0f : offset_of(FORMAT);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        out[b] = unsigned_byte(low, b) - OFFSET;
        if constexpr (!has_bytes(FORMAT)) {
            out[4 + b] = unsigned_byte(high, b) - OFFSET;
        }
    }
}

// Values of 6 bits as signed bytes: four low nibbles or the high ones (half 1), and above them two
// bits of each byte of `pairs`: of its low half for steps 0 and 1, of its high half for 2 and 3.
DEVICE u32 six_bit_values(u32 nibbles, u32 pairs, int step, int half) {
    u32 low = nibbles >> 4 * half & 0x0f0f0f0fu;
    u32 values = low | (pairs >> (4 * (step / 2) + 2 * half) & 0x03030303u) << 4;
    return ((values | 0x80808080u) - 0x20202020u) ^ 0x80808080u;
}

// The scale of the first or the second half of a group.
template <int FORMAT>
DEVICE float half_scale(const u8* row, int width, int group, int half) {
    int chunk = group / CHUNK_GROUPS, size = chunk_size(chunk, width / GROUP);
    int place = chunk * 2 * CHUNK_GROUPS + half * size + group % CHUNK_GROUPS;
    return small_scale<FORMAT>(row, width, group, place);
}

// Signed bytes of a half of a group where halves have scales: of word `step` of a group, and of 6
// bits a word of what stands above.
template <int FORMAT>
DEVICE u32 half_values(u32 word, u32 pairs, int step, int half) {
    if constexpr (has_table(FORMAT)) {
        u32 low, high;
        look_up<FORMAT>(word, low, high);
        return half ? high : low;
    }
    return six_bit_values(word, pairs, step, half);
}

// Words of a group where halves have scales: of nibbles, and of 6 bits two of what stands above.
DEVICE constexpr int half_words_of(int format) { return has_table(format) ? 4 : 6; }
