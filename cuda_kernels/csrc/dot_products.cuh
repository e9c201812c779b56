// Dot products of a few rows with a few vectors by one warp: lanes lie along the columns.
//
// Each is added up in the same order, whatever rows and vectors are computed beside it: a lane
// takes its pieces in turn, then lanes are summed in a tree.
#pragma once
#include "formats.cuh"

// The vectors of a step: x (T, width); for quantized rows instead quantized activations: values
// (T, width) int8 in the order of rows, scales (T, width / 32) and groups' sums (quantize.cu).
struct Input {
    const float* x;
    const u8* values;
    const float* scales;
    const float* sums;
    int num_tokens;
    int width;

    // A token's vector in a tile; tokens beyond the last repeat the last.
    DEVICE i64 token(int number) const { return min_of(number, num_tokens - 1); }
};

DEVICE constexpr int rows_of(int format, int tokens) {
    return is_quantized(format) ? 2 : tokens >= 4 ? 4 : 1;
}

// Rows first_row, first_row + row_bytes, ... Rows whose bit in `active` is not set are not read.
struct Rows {
    const u8* first_row;
    i64 row_bytes;
    u32 active;

    DEVICE const u8* row(int number) const { return first_row + number * row_bytes; }
    DEVICE bool is_active(int number) const { return active >> number & 1; }
};

template <int FORMAT, bool VECTOR, int ROWS, int TOKENS>
DEVICE void add_float_products(
    const Rows& rows, const Input& in, int first_token, int lane, float (&sums)[ROWS][TOKENS]) {
    constexpr int ITEMS = items_of(FORMAT);
    constexpr int UNROLL = ROWS * TOKENS <= 2 ? 4 : TOKENS <= 4 ? 2 : 1;  // pieces in flight
    for (int begin = 0; begin < in.width; begin += UNROLL * WARP * ITEMS) {
        uint4 pieces[UNROLL][ROWS];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            int k = begin + (u * WARP + lane) * ITEMS;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                pieces[u][r] = make_uint4(0, 0, 0, 0);
                if (k < in.width && rows.is_active(r)) {
                    const u8* row = rows.row(r);
                    pieces[u][r] = float_piece<FORMAT, VECTOR, TOKENS < 8>(row, k, in.width);
                }
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            int k = begin + (u * WARP + lane) * ITEMS;
            if (k >= in.width) continue;
            float weights[ROWS][ITEMS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) widen_piece<FORMAT>(pieces[u][r], weights[r]);
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                float x[ITEMS];
                const float* vector = in.x + in.token(first_token + t) * in.width;
                load_floats<ITEMS, VECTOR>(vector, k, in.width, x);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                    for (int i = 0; i < ITEMS; ++i) {
                        sums[r][t] = fmaf(weights[r][i], x[i], sums[r][t]);
                    }
                }
            }
        }
    }
}

// Signed bytes of the low nibbles, and of the high ones: 16 * (nibble - 8); the nibbles where there
// are minima. `unit_scale` converts them to values.
template <int FORMAT>
DEVICE int low_nibbles(u32 word) {
    if constexpr (has_min(FORMAT)) return static_cast<int>(word & 0x0f0f0f0fu);
    return static_cast<int>((word ^ 0x88888888u) << 4 & 0xf0f0f0f0u);
}
template <int FORMAT>
DEVICE int high_nibbles(u32 word) {
    if constexpr (has_min(FORMAT)) return static_cast<int>(word >> 4 & 0x0f0f0f0fu);
    return static_cast<int>((word ^ 0x88888888u) & 0xf0f0f0f0u);
}
DEVICE constexpr float unit_scale(int format) {
    return codes_of(format) == NIBBLES_CODES && !has_min(format) ? 0.0625f : 1.0f;
}

// The vectors' words that belong to four steps of a quarter's weights.
template <int FORMAT, bool VECTOR>
DEVICE void load_values(
    const u8* from, int step_bytes, int valid, uint4 (&out)[values_of(FORMAT)]) {
#pragma unroll
    for (int s = 0; s < values_of(FORMAT); ++s) {
        out[s] = quarter_piece<VECTOR, false>(from + s * step_bytes, valid);
    }
}

// Values of 5 bits as signed bytes, of the low nibbles or the high ones (half 1).
template <int FORMAT>
DEVICE int five_bits(u32 word, u32 fifths, int step, int half) {
    u32 values = (word >> 4 * half & 0x0f0f0f0fu) | upper_bits(fifths, step, half);
    if constexpr (offset_of(FORMAT)) values = ((values | 0x80808080u) - 0x10101010u) ^ 0x80808080u;
    return static_cast<int>(values);
}

// Words of a group's weights: of each step, and of 5 bits one more.
DEVICE constexpr int words_of(int format) { return has_fifths(format) ? 5 : 4; }

// Integer products of four steps of weights with a vector's words, a sum for each group.
template <int FORMAT>
DEVICE void add_words(
    const uint4 (&weights)[words_of(FORMAT)], const uint4 (&values)[values_of(FORMAT)],
    int (&sums)[QUARTER]) {
#pragma unroll
    for (int q = 0; q < QUARTER; ++q) {
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            u32 word = word_of(weights[s], q);
            if constexpr (has_bytes(FORMAT)) {
                int x = static_cast<int>(word_of(values[s], q));
                sums[q] = __dp4a(static_cast<int>(word), x, sums[q]);
            } else {
                int x0 = static_cast<int>(word_of(values[2 * s], q));
                int x1 = static_cast<int>(word_of(values[2 * s + 1], q));
                if constexpr (has_fifths(FORMAT)) {
                    u32 fifths = word_of(weights[4], q);
                    sums[q] = __dp4a(five_bits<FORMAT>(word, fifths, s, 0), x0, sums[q]);
                    sums[q] = __dp4a(five_bits<FORMAT>(word, fifths, s, 1), x1, sums[q]);
                    continue;
                }
                if constexpr (has_table(FORMAT)) {
                    u32 low, high;
                    look_up<FORMAT>(word, low, high);
                    sums[q] = __dp4a(static_cast<int>(low), x0, sums[q]);
                    sums[q] = __dp4a(static_cast<int>(high), x1, sums[q]);
                    continue;
                }
                sums[q] = __dp4a(low_nibbles<FORMAT>(word), x0, sums[q]);
                sums[q] = __dp4a(high_nibbles<FORMAT>(word), x1, sums[q]);
            }
        }
    }
}

// A lane's unit is four groups of a chunk: all four steps of 4 bits, the first or last four of 8.
template <int FORMAT, bool VECTOR, int ROWS, int TOKENS>
DEVICE void add_quantized_products(
    const Rows& rows, const Input& in, int first_token, int lane, float (&sums)[ROWS][TOKENS]) {
    constexpr int UNITS = steps_of(FORMAT);  // of a chunk
    constexpr float UNIT_SCALE = unit_scale(FORMAT);
    int groups = in.width / GROUP;
    int num_units = (groups + CHUNK_GROUPS - 1) / CHUNK_GROUPS * UNITS;
    for (int unit = lane; unit < num_units; unit += WARP) {
        int chunk = unit / UNITS, quarter = unit % QUARTER;
        int half = unit / QUARTER % (UNITS / QUARTER);
        int size = chunk_size(chunk, groups), valid = min_of(QUARTER, size - QUARTER * quarter);
        if (valid <= 0) continue;
        int step_bytes = 4 * size, place = 16 * quarter + 4 * half * step_bytes;
        int group = chunk * CHUNK_GROUPS + quarter * QUARTER;
        i64 offset = value_bytes<FORMAT>(static_cast<i64>(chunk) * CHUNK) + place;
        uint4 weights[ROWS][words_of(FORMAT)];
        float scales[ROWS][QUARTER], minima[ROWS][QUARTER];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int s = 0; s < words_of(FORMAT); ++s) {
                weights[r][s] = make_uint4(0, 0, 0, 0);
                if (rows.is_active(r)) {
                    const u8* from = rows.row(r) + offset + s * step_bytes;
                    weights[r][s] = quarter_piece<VECTOR, TOKENS < 8>(from, valid);
                }
            }
#pragma unroll
            for (int q = 0; q < QUARTER; ++q) scales[r][q] = minima[r][q] = 0.0f;
            if (rows.is_active(r)) {
                const u8* row = rows.row(r);
                quarter_factors<FORMAT, VECTOR, 0>(row, in.width, group, valid, scales[r]);
                if constexpr (has_min(FORMAT)) {
                    quarter_factors<FORMAT, VECTOR, 1>(row, in.width, group, valid, minima[r]);
                }
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            i64 token = in.token(first_token + t);
            uint4 values[values_of(FORMAT)];
            float own[QUARTER] = {};
            const u8* from = in.values + token * in.width + static_cast<i64>(chunk) * CHUNK + place;
            load_values<FORMAT, VECTOR>(from, step_bytes, valid, values);
            const float* own_scales = in.scales + token * groups + group;
            load_floats<QUARTER, VECTOR>(own_scales, 0, valid, own);
            float own_sums[QUARTER] = {};
            if constexpr (has_min(FORMAT)) {
                load_floats<QUARTER, VECTOR>(in.sums + token * groups + group, 0, valid, own_sums);
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                int products[QUARTER] = {};
                add_words<FORMAT>(weights[r], values, products);
#pragma unroll
                for (int q = 0; q < QUARTER; ++q) {
                    float scale = scales[r][q] * UNIT_SCALE * own[q];
                    sums[r][t] = fmaf(static_cast<float>(products[q]), scale, sums[r][t]);
                    if constexpr (has_min(FORMAT)) {
                        sums[r][t] = fmaf(minima[r][q], own_sums[q], sums[r][t]);
                    }
                }
            }
        }
    }
}

// `add_quantized_products` where halves have scales: a lane's unit is four groups of a chunk; each
// half has its sum.
template <int FORMAT, bool VECTOR, int ROWS, int TOKENS>
DEVICE void add_half_products(
    const Rows& rows, const Input& in, int first_token, int lane, float (&sums)[ROWS][TOKENS]) {
    int groups = in.width / GROUP;
    int num_units = (groups + CHUNK_GROUPS - 1) / CHUNK_GROUPS * QUARTER;
    for (int unit = lane; unit < num_units; unit += WARP) {
        int chunk = unit / QUARTER, quarter = unit % QUARTER;
        int size = chunk_size(chunk, groups), valid = min_of(QUARTER, size - QUARTER * quarter);
        if (valid <= 0) continue;
        int step_bytes = 4 * size, group = chunk * CHUNK_GROUPS + quarter * QUARTER;
        i64 offset = value_bytes<FORMAT>(static_cast<i64>(chunk) * CHUNK) + 16 * quarter;
        constexpr int WORDS = half_words_of(FORMAT);
        uint4 weights[ROWS][WORDS];  // four steps of nibbles, then what stands above them
        float scales[ROWS][2][QUARTER];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int s = 0; s < WORDS; ++s) {
                weights[r][s] = make_uint4(0, 0, 0, 0);
                if (!rows.is_active(r)) continue;
                const u8* from = rows.row(r) + offset + s * step_bytes;
                weights[r][s] = quarter_piece<VECTOR, TOKENS < 8>(from, valid);
            }
#pragma unroll
            for (int q = 0; q < 2 * QUARTER; ++q) {
                float& scale = scales[r][q / QUARTER][q % QUARTER];
                scale = 0.0f;
                if (!rows.is_active(r) || q % QUARTER >= valid) continue;
                scale = half_scale<FORMAT>(rows.row(r), in.width, group + q % QUARTER, q / QUARTER);
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            i64 token = in.token(first_token + t);
            const u8* from =
                in.values + token * in.width + static_cast<i64>(chunk) * CHUNK + 16 * quarter;
            float own[QUARTER] = {};
            load_floats<QUARTER, VECTOR>(in.scales + token * groups + group, 0, valid, own);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint4 values[4];
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    int step = 4 * half + s;
                    values[s] = quarter_piece<VECTOR, false>(from + step * step_bytes, valid);
                }
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                    for (int q = 0; q < QUARTER; ++q) {
                        int product = 0;
#pragma unroll
                        for (int s = 0; s < 4; ++s) {
                            u32 pairs = word_of(weights[r][WORDS > 4 ? 4 + s % 2 : s], q);
                            u32 word =
                                half_values<FORMAT>(word_of(weights[r][s], q), pairs, s, half);
                            int x = static_cast<int>(word_of(values[s], q));
                            product = __dp4a(static_cast<int>(word), x, product);
                        }
                        float scale = scales[r][half][q] * own[q];
                        sums[r][t] = fmaf(static_cast<float>(product), scale, sums[r][t]);
                    }
                }
            }
        }
    }
}

// The dot product of row p / TOKENS with token p % TOKENS, in lane p of the warp.
template <int FORMAT, bool VECTOR, int ROWS, int TOKENS>
DEVICE float dot_products(const Rows& rows, const Input& in, int first_token, int lane) {
    float sums[ROWS][TOKENS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) sums[r][t] = 0.0f;
    }
    if constexpr (has_halves(FORMAT)) {
        add_half_products<FORMAT, VECTOR>(rows, in, first_token, lane, sums);
    } else if constexpr (is_quantized(FORMAT)) {
        add_quantized_products<FORMAT, VECTOR>(rows, in, first_token, lane, sums);
    } else {
        add_float_products<FORMAT, VECTOR>(rows, in, first_token, lane, sums);
    }
    float own = 0.0f;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            if (first_token + t >= in.num_tokens) continue;
            float sum = warp_sum(sums[r][t]);
            if (lane == r * TOKENS + t) own = sum;
        }
    }
    return own;
}

// The rows and tokens of a warp: `tiles` warps share rows and have a tile of TOKENS tokens each.
template <int ROWS, int TOKENS>
struct WarpTile {
    int lane, tile, set, first_token;
    i64 first_row;
    int num_rows;  // of ROWS

    DEVICE WarpTile(int tiles, i64 all_rows) {
        int warp = threadIdx.x / WARP;
        lane = threadIdx.x % WARP, tile = warp % tiles, set = warp / tiles;
        first_token = tile * TOKENS;
        first_row = (static_cast<i64>(blockIdx.x) * (WARPS / tiles) + set) * ROWS;
        i64 left = all_rows - first_row;
        num_rows = left >= ROWS ? ROWS : left > 0 ? static_cast<int>(left) : 0;
    }

    // The row and the token of a lane's dot product.
    DEVICE int row() const { return lane / TOKENS; }
    DEVICE int token() const { return first_token + lane % TOKENS; }
    DEVICE bool is_valid(int num_tokens) const { return row() < num_rows && token() < num_tokens; }
    DEVICE Rows rows(const u8* weights, i64 row_bytes) const {
        return Rows{weights + first_row * row_bytes, row_bytes, (1u << num_rows) - 1};
    }
};
