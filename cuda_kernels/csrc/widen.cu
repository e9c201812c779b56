// Rows as float16, for matrix products of many tokens; a block a row, a thread eight columns.
#include "formats.cuh"

template <int FORMAT>
DEVICE float quantized_weight(const u8* row, int width, int column) {
    int groups = width / GROUP, group = column / GROUP, item = column % GROUP;
    int chunk = group / CHUNK_GROUPS, size = chunk_size(chunk, groups);
    i64 place = value_bytes<FORMAT>(static_cast<i64>(chunk) * CHUNK) + 4 * (group % CHUNK_GROUPS);
    int step = item / values_of(FORMAT);
    u32 byte = load(row + place + step * 4 * size + item % 4);
    float scale = group_scale<FORMAT>(row, width, group);
    if constexpr (has_bytes(FORMAT)) {
        return scale * static_cast<float>(static_cast<signed char>(byte));
    } else {
        u32 number = item % 8 < 4 ? byte & 15 : byte >> 4;
        if constexpr (has_table(FORMAT)) {
            u32 low, high;
            look_up<FORMAT>(number, low, high);
            return scale * (unsigned_byte(low ^ 0x80808080u, 0) - 128.0f);
        }
        if constexpr (has_fifths(FORMAT)) {
            u32 fifths = load(row + place + 4 * 4 * size + item % 4);
            number |= upper_bits(fifths, step, item % 8 / 4) & 16;
        }
        float value = static_cast<float>(number);
        if constexpr (has_min(FORMAT)) return scale * value + group_min<FORMAT>(row, width, group);
        return scale * (value - static_cast<float>(offset_of(FORMAT)));
    }
}

// `quantized_weight` where each half has its scale.
template <int FORMAT>
DEVICE float half_weight(const u8* row, int width, int column) {
    int groups = width / GROUP, group = column / GROUP, item = column % GROUP;
    int chunk = group / CHUNK_GROUPS, size = chunk_size(chunk, groups);
    int half = item / 16, step = item % 16 / 4;
    const u8* from = row + value_bytes<FORMAT>(static_cast<i64>(chunk) * CHUNK) +
                     4 * (group % CHUNK_GROUPS) + item % 4;
    u32 pairs = has_table(FORMAT) ? 0 : load(from + (4 + step % 2) * 4 * size);
    u32 value = half_values<FORMAT>(load(from + step * 4 * size), pairs, step, half);
    float whole = static_cast<float>(static_cast<signed char>(value & 0xff));
    return half_scale<FORMAT>(row, width, group, half) * whole;
}

// Eight weights from `column` on, of a quantized row within one group.
template <int FORMAT, bool VECTOR>
DEVICE void eight_weights(const u8* row, int width, int column, float (&out)[8]) {
    if constexpr (has_halves(FORMAT)) {
#pragma unroll
        for (int i = 0; i < 8; ++i) out[i] = half_weight<FORMAT>(row, width, column + i);
    } else if constexpr (is_quantized(FORMAT) && VECTOR && !has_fifths(FORMAT)) {
        int groups = width / GROUP, group = column / GROUP, item = column % GROUP;
        int chunk = group / CHUNK_GROUPS, size = chunk_size(chunk, groups);
        int step = item / values_of(FORMAT);
        i64 place = value_bytes<FORMAT>(static_cast<i64>(chunk) * CHUNK);
        const u8* from = row + place + 4 * (step * size + group % CHUNK_GROUPS);
        float scale = group_scale<FORMAT>(row, width, group);
        if constexpr (has_bytes(FORMAT)) {
            float low[4], high[4];
            word_values<FORMAT>(load(reinterpret_cast<const u32*>(from)), low);
            word_values<FORMAT>(load(reinterpret_cast<const u32*>(from + 4 * size)), high);
#pragma unroll
            for (int i = 0; i < 4; ++i) out[i] = low[i], out[4 + i] = high[i];
        } else {
            word_values<FORMAT>(load(reinterpret_cast<const u32*>(from)), out);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            out[i] *= scale;
            if constexpr (has_min(FORMAT)) out[i] += group_min<FORMAT>(row, width, group);
        }
    } else if constexpr (is_quantized(FORMAT)) {
#pragma unroll
        for (int i = 0; i < 8; ++i) out[i] = quantized_weight<FORMAT>(row, width, column + i);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i += items_of(FORMAT)) {
            float some[items_of(FORMAT)];
            uint4 piece = make_uint4(0, 0, 0, 0);
            if (column + i < width) {
                piece = float_piece<FORMAT, VECTOR, true>(row, column + i, width);
            }
            widen_piece<FORMAT>(piece, some);
#pragma unroll
            for (int j = 0; j < items_of(FORMAT); ++j) out[i + j] = some[j];
        }
    }
}

template <int FORMAT, bool VECTOR>
DEVICE void widen_row(const u8* row, int width, u16* out) {
    for (int column = 8 * threadIdx.x; column < width; column += 8 * THREADS) {
        float weights[8];
        eight_weights<FORMAT, VECTOR>(row, width, column, weights);
        u32 halves[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) halves[i] = float_to_finite_half(weights[i]);
        if (VECTOR && width % 8 == 0) {
            uint4 eight = make_uint4(
                halves[0] | halves[1] << 16, halves[2] | halves[3] << 16,
                halves[4] | halves[5] << 16, halves[6] | halves[7] << 16);
            store(reinterpret_cast<uint4*>(out + column), eight);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (column + i < width) store(out + column + i, static_cast<u16>(halves[i]));
            }
        }
    }
}

#define WIDEN(FORMAT, VECTOR)                                                                      \
    ENTRY(THREADS)                                                                                 \
    widen_##FORMAT##_##VECTOR(const u8* rows, i64 row_bytes, int width, u16* out) {                \
        i64 row = blockIdx.x;                                                                      \
        widen_row<FORMAT, VECTOR>(rows + row * row_bytes, width, out + row * width);               \
    }
