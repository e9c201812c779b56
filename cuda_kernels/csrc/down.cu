// The hot FFN's second kernel: partial sums of h[n, t] * down[n] over parts of the neurons.
//
// Neurons are cut into parts, and four parts are a run. A block takes one part or a run of them,
// and a range of columns. Within a part the neurons that fired are added in ascending order; a run
// is the sum of its parts in order. So the order of additions does not depend on how parts are
// assigned to blocks, nor on batch-mates, whose neurons add zeros.
#include "formats.cuh"

constexpr int MAX_PART = THREADS;  // neurons of a part
constexpr int MAX_STEP_TOKENS = 32;

// What a thread reads of a row: its offset, and its columns.
template <int FORMAT, bool VECTOR>
struct Piece {
    // Words of the same step, of as many groups.
    static constexpr int WORD_ITEMS = values_of(FORMAT);
    static constexpr int WORDS = VECTOR ? 16 / WORD_ITEMS : 1;
    static constexpr int ITEMS = is_quantized(FORMAT) ? WORDS * WORD_ITEMS : items_of(FORMAT);

    int width, number;  // of the piece within the row
    int group, step, size;
    i64 offset;

    DEVICE Piece(int number, int width) : width(width), number(number), group(0), step(0), size(1) {
        offset = 0;
        if constexpr (is_quantized(FORMAT)) {
            constexpr int PIECES = CHUNK_GROUPS * steps_of(FORMAT) / WORDS;  // of a whole chunk
            int chunk = number / PIECES, word = number % PIECES * WORDS;
            size = chunk_size(chunk, width / GROUP);
            if (size <= 0) return;
            step = word / size, group = chunk * CHUNK_GROUPS + word % size;
            offset = value_bytes<FORMAT>(static_cast<i64>(chunk) * CHUNK) + 4 * word;
        }
    }

    DEVICE bool is_inside() const { return static_cast<i64>(number) * ITEMS < width; }

    // Items 0, 4, 8, ... of the piece start four adjacent columns each.
    DEVICE int column(int item) const {
        if constexpr (!is_quantized(FORMAT)) return number * ITEMS + item;
        return (group + item / WORD_ITEMS) * GROUP + step * WORD_ITEMS + item % WORD_ITEMS;
    }

    DEVICE uint4 read(const u8* row) const {
        if constexpr (!is_quantized(FORMAT)) {
            return float_piece<FORMAT, VECTOR, false>(row, number * ITEMS, width);
        } else if constexpr (!VECTOR) {
            return make_uint4(load_bytes(row + offset), 0, 0, 0);
        } else if constexpr (WORDS == 4) {
            return load(reinterpret_cast<const uint4*>(row + offset));
        } else {
            uint2 two = load(reinterpret_cast<const uint2*>(row + offset));
            return make_uint4(two.x, two.y, 0, 0);
        }
    }

    DEVICE void read_factors(const u8* row, float (&scales)[WORDS], float (&minima)[WORDS]) const {
        if constexpr (is_quantized(FORMAT)) {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                scales[i] = group_scale<FORMAT>(row, width, group + i);
                minima[i] = group_min<FORMAT>(row, width, group + i);
            }
        }
    }

    // sums[t] += h[t] * weights
    template <int TOKENS>
    DEVICE static void add(
        const uint4& piece, const float (&scales)[WORDS], const float (&minima)[WORDS],
        const float* h, float (&sums)[TOKENS][ITEMS]) {
        if constexpr (is_quantized(FORMAT)) {
#pragma unroll
            for (int word = 0; word < WORDS; ++word) {
                float values[WORD_ITEMS];
                word_values<FORMAT>(word_of(piece, word), values);
                if constexpr (has_min(FORMAT)) {
#pragma unroll
                    for (int i = 0; i < WORD_ITEMS; ++i) {
                        values[i] = fmaf(scales[word], values[i], minima[word]);
                    }
                }
#pragma unroll
                for (int t = 0; t < TOKENS; ++t) {
                    float factor = has_min(FORMAT) ? h[t] : h[t] * scales[word];
#pragma unroll
                    for (int i = 0; i < WORD_ITEMS; ++i) {
                        float& sum = sums[t][word * WORD_ITEMS + i];
                        sum = fmaf(factor, values[i], sum);
                    }
                }
            }
        } else {
            float values[ITEMS];
            widen_piece<FORMAT>(piece, values);
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
                for (int i = 0; i < ITEMS; ++i) sums[t][i] = fmaf(h[t], values[i], sums[t][i]);
            }
        }
    }
};

// The neurons of a part that fired, in ascending order, and their h for a tile of tokens each.
template <int STEP_TOKENS>
struct Fired {
    int of_warps[WARPS];
    int ids[MAX_PART];
    float h[MAX_PART * STEP_TOKENS];
};

constexpr int UP_SHIFT = 16;  // of a part's two counts in one number

// Fills `fired` with those of neurons first..last-1 that fired, h zero beyond `num_tokens`.
// Returns their number, and from bit UP_SHIFT on the number of up rows read.
template <int STEP_TOKENS>
DEVICE int list_fired(
    const int* is_fired, const float* h, int first, int last, int num_tokens, int step_tokens,
    Fired<STEP_TOKENS>& fired) {
    int neuron = first + threadIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int bits = neuron < last ? load(is_fired + neuron) : 0;
    bool is_listed = bits & 1;
    u32 lanes = __ballot_sync(ALL_LANES, is_listed);
    u32 up_lanes = __ballot_sync(ALL_LANES, (bits & 2) != 0);
    __syncthreads();  // the list before this one has been read
    if (lane == 0) fired.of_warps[warp] = __popc(lanes) | __popc(up_lanes) << UP_SHIFT;
    __syncthreads();
    int place = __popc(lanes & ((1u << lane) - 1)), counts = 0;
    for (int i = 0; i < WARPS; ++i) {
        if (i < warp) place += fired.of_warps[i] & ((1 << UP_SHIFT) - 1);
        counts += fired.of_warps[i];
    }
    int count = counts & ((1 << UP_SHIFT) - 1);
    if (is_listed) fired.ids[place] = neuron;
    __syncthreads();
    for (int i = threadIdx.x; i < count * step_tokens; i += THREADS) {
        int token = i % step_tokens;
        i64 row = fired.ids[i / step_tokens];
        fired.h[i] = token < num_tokens ? load(h + row * num_tokens + token) : 0.0f;
    }
    __syncthreads();
    return counts;
}

struct DownRows {
    const u8* down;
    const int* is_fired;
    const float* h;
    i64 row_bytes;
    int num_neurons, width, num_tokens;
};

struct Parts {
    int part_size, parts_a_block;
    int tiles;  // of tokens
};

// Adds a part's listed rows to `sums`; a thread has a few of them in flight.
template <int FORMAT, bool VECTOR, int TOKENS, int STEP_TOKENS>
DEVICE void add_part(
    const DownRows& from, const Piece<FORMAT, VECTOR>& piece, const Fired<STEP_TOKENS>& fired,
    int count, int step_tokens, int first_token,
    float (&sums)[TOKENS][Piece<FORMAT, VECTOR>::ITEMS]) {
    using Own = Piece<FORMAT, VECTOR>;
    constexpr int AHEAD = TOKENS <= 2 ? 8 : 4;
    for (int begin = 0; begin < count; begin += AHEAD) {
        uint4 pieces[AHEAD];
        float scales[AHEAD][Own::WORDS], minima[AHEAD][Own::WORDS];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            if (begin + u >= count) continue;
            const u8* row = from.down + fired.ids[begin + u] * from.row_bytes;
            pieces[u] = piece.read(row);
            piece.read_factors(row, scales[u], minima[u]);
        }
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            if (begin + u >= count) continue;
            float h[TOKENS];
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                h[t] = fired.h[(begin + u) * step_tokens + first_token + t];
            }
            Own::template add<TOKENS>(pieces[u], scales[u], minima[u], h, sums);
        }
    }
}

// out[c] (= or +=) the sums of one token, for the columns of a piece.
template <int FORMAT, bool VECTOR>
DEVICE void store_sums(
    const Piece<FORMAT, VECTOR>& piece, const float (&sums)[Piece<FORMAT, VECTOR>::ITEMS],
    bool is_first, float* out) {
#pragma unroll
    for (int item = 0; item < Piece<FORMAT, VECTOR>::ITEMS; item += 4) {
        int column = piece.column(item);
        if constexpr (VECTOR) {
            float4 sum = make_float4(sums[item], sums[item + 1], sums[item + 2], sums[item + 3]);
            float4* cell = reinterpret_cast<float4*>(out + column);
            if (!is_first) {
                float4 before = load_own(cell);
                sum.x += before.x, sum.y += before.y, sum.z += before.z, sum.w += before.w;
            }
            store(cell, sum);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float* cell = out + column + i;
                if (column + i >= piece.width) continue;
                store(cell, is_first ? sums[item + i] : load_own(cell) + sums[item + i]);
            }
        }
    }
}

// partials (grid.y, T, width): the sums of each block's parts; fired_counts (all parts,).
template <int FORMAT, bool VECTOR, int TOKENS>
DEVICE void down_parts(
    const DownRows& from, const Parts& parts, float* partials, int* fired_counts) {
    constexpr int MAX_TILES = MAX_STEP_TOKENS / TOKENS;
    constexpr int STEP_TOKENS = TOKENS < 4 ? TOKENS : TOKENS * MAX_TILES;
    using Own = Piece<FORMAT, VECTOR>;
    __shared__ Fired<STEP_TOKENS> fired;
    int columns = THREADS / parts.tiles, tile = threadIdx.x / columns, first_token = tile * TOKENS;
    Own piece(blockIdx.x * columns + threadIdx.x % columns, from.width);
    int first_part = blockIdx.y * parts.parts_a_block;
    for (int p = 0; p < parts.parts_a_block; ++p) {
        i64 first = static_cast<i64>(first_part + p) * parts.part_size;
        i64 last = first + parts.part_size;
        if (first >= from.num_neurons) break;
        if (last > from.num_neurons) last = from.num_neurons;
        int counts = list_fired(
            from.is_fired, from.h, static_cast<int>(first), static_cast<int>(last), from.num_tokens,
            TOKENS * parts.tiles, fired);
        int count = counts & ((1 << UP_SHIFT) - 1);
        if (blockIdx.x == 0 && threadIdx.x == 0) store(fired_counts + first_part + p, counts);
        if (!piece.is_inside()) continue;
        float sums[TOKENS][Own::ITEMS] = {};
        add_part<FORMAT, VECTOR, TOKENS>(
            from, piece, fired, count, TOKENS * parts.tiles, first_token, sums);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            i64 row = static_cast<i64>(blockIdx.y) * from.num_tokens + first_token + t;
            if (first_token + t >= from.num_tokens) continue;
            store_sums<FORMAT, VECTOR>(piece, sums[t], p == 0, partials + row * from.width);
        }
    }
}

#define DOWN_PARTS(FORMAT, VECTOR, TOKENS)                                                         \
    ENTRY(THREADS)                                                                                 \
    down_parts_##FORMAT##_##VECTOR##_##TOKENS(                                                     \
        DownRows from, Parts parts, float* partials, int* fired_counts) {                          \
        down_parts<FORMAT, VECTOR, TOKENS>(from, parts, partials, fired_counts);                   \
    }
