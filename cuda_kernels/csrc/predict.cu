// Predictors, as numba_kernels.decode.predict has them to the bit: of signs, the input in three bits a
// number and weighted counts of bits that differ; of low rank, two matrices; and lists of the neurons
// that are expected to fire.
//
// `told`: see share.cu. Words of 64 bits are pairs of 32 here, the lower one first.
#include "common.cuh"

constexpr int LANES = 256, GROUPS = LANES / WARP;
constexpr int INPUT_PLANES = 3, TOP = (1 << INPUT_PLANES) - 1;
constexpr double LEVELS_SPAN = 2.5;

// x, center, scale (width,); planes (3, words) and a unit of each token.
struct Input {
    const float *x, *center, *scale;
    u32* planes;
    float* units;
    int width, words, num_tokens;
};

DEVICE float centred(const Input& in, const float* x, int i) {
    return (load(x + i) - load(in.center + i)) * load(in.scale + i);
}

DEVICE float sum_of_squares(const Input& in, const float* x) {
    __shared__ float sums[GROUPS];
    float sum = 0.0f, total = 0.0f;
    for (int i = threadIdx.x; i < in.width; i += LANES) {
        float value = centred(in, x, i);
        sum += value * value;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    for (int group = 0; group < GROUPS; ++group) total += sums[group];
    return total;
}

#define PACK_PLANES()                                                                              \
    ENTRY(LANES)                                                                                   \
    pack_planes(Input in) { pack_token(in); }

DEVICE void pack_token(const Input& in) {
    const float* x = in.x + static_cast<i64>(blockIdx.x) * in.width;
    u32* planes = in.planes + static_cast<i64>(blockIdx.x) * INPUT_PLANES * in.words;
    __shared__ float unit;
    float squares = sum_of_squares(in, x);
    bool is_known = 0.0f < squares && squares < infinity();
    if (threadIdx.x == 0) {
        double root = sqrt(static_cast<double>(squares) / in.width);
        unit = is_known ? static_cast<float>(root * LEVELS_SPAN / TOP) : squares * 0.0f;
        store(in.units + blockIdx.x, unit);
    }
    __syncthreads();
    float half = 0.5f / unit;
    for (int first = 0; first < in.words * WARP; first += LANES) {
        int i = first + threadIdx.x;
        u32 code = 0;
        if (is_known && i < in.width) {
            float level = centred(in, x, i) * half + 0.5f * (TOP + 1);
            code = static_cast<u32>(fminf(fmaxf(level, 0.0f), static_cast<float>(TOP)));
        }
        for (int k = 0; k < INPUT_PLANES; ++k) {
            u32 bits = __ballot_sync(ALL_LANES, code >> k & 1);
            if (threadIdx.x % WARP == 0 && i / WARP < in.words) {
                store(planes + k * in.words + i / WARP, bits);
            }
        }
    }
}

// bits (num_neurons, num_planes * words), thresholds (num_neurons,).
struct Rows {
    const u32* bits;
    const float* thresholds;
    int num_neurons, num_planes;
};

// The weighted count of bits in which a row differs from a token's planes: the same in every lane.
DEVICE int count_of(const u32* row, const u32* planes, int num_planes, int words) {
    int lane = threadIdx.x % WARP, count = 0;
    for (int p = 0; p < num_planes; ++p) {
        for (int word = lane; word < words; word += WARP) {
            u32 own = load(row + p * words + word);
            for (int k = 0; k < INPUT_PLANES; ++k) {
                count += __popc(own ^ load(planes + k * words + word)) << (p + k);
            }
        }
    }
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        count += __shfl_xor_sync(ALL_LANES, count, offset);
    }
    return count;
}

// masks (num_neurons,): bit t where the neuron is expected to fire for token t.
DEVICE void score_neuron(const Rows& rows, const Input& in, u32* masks) {
    int n = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (n >= rows.num_neurons) return;
    const u32* row = rows.bits + static_cast<i64>(n) * rows.num_planes * in.words;
    int most = ((1 << rows.num_planes) - 1) * TOP * in.width;
    float threshold = load(rows.thresholds + n);
    u32 mask = 0;
    for (int t = 0; t < in.num_tokens; ++t) {
        const u32* planes = in.planes + t * INPUT_PLANES * in.words;
        int count = count_of(row, planes, rows.num_planes, in.words);
        float score = load(in.units + t) * static_cast<float>(most - 2 * count) - threshold;
        // A NaN score counts as above zero: the neuron is computed, and the NaN is seen.
        if (!(score <= 0.0f)) mask |= 1u << t;
    }
    if (threadIdx.x % WARP == 0) store(masks + n, mask);
}

#define SCORE_NEURONS()                                                                            \
    ENTRY(THREADS)                                                                                 \
    score_neurons(Rows rows, Input in, u32* masks) { score_neuron(rows, in, masks); }

// A low-rank predictor: down (size, width), scales (size,), up (size, num_neurons), thresholds.
template <typename T>
struct LowRank {
    const T *down, *up;
    const float *scales, *thresholds;
    int size, width, num_neurons, num_tokens;
};

DEVICE float number_of(u16 bits) { return half_to_float(bits); }
DEVICE float number_of(signed char value) { return static_cast<float>(value); }

constexpr int SUM_LANES = 16, BLOCK = 8 * SUM_LANES;  // as in numba_kernels.ir.float_ir

// row . x by a warp, the same in every lane: blocks go to the halves' sums in turn, what is left in
// whole vectors to the first, the last numbers to a third.
template <typename T>
DEVICE float dot_of(const T* row, const float* x, int width) {
    int lane = threadIdx.x % SUM_LANES, half = threadIdx.x % WARP / SUM_LANES;
    int paired = width / (2 * BLOCK) * (2 * BLOCK), whole = width / SUM_LANES * SUM_LANES;
    float sum = 0.0f, tail = 0.0f;
    for (int first = half * BLOCK + lane; first < paired; first += 2 * BLOCK) {
#pragma unroll
        for (int i = first; i < first + BLOCK; i += SUM_LANES) {
            sum = fmaf(number_of(load(row + i)), load(x + i), sum);
        }
    }
    for (int i = paired + lane; half == 0 && i < whole; i += SUM_LANES) {
        sum = fmaf(number_of(load(row + i)), load(x + i), sum);
    }
    for (int i = whole; i < width; ++i) tail = fmaf(number_of(load(row + i)), load(x + i), tail);
    return warp_sum(sum) + tail;
}

// hidden (num_tokens, size): a warp a number; a NaN stays one.
template <typename T>
DEVICE void hidden_unit(const LowRank<T>& of, const float* x, float* hidden) {
    int unit = blockIdx.x * WARPS + threadIdx.x / WARP, token = blockIdx.y;
    if (unit >= of.size) return;
    const T* row = of.down + static_cast<i64>(unit) * of.width;
    float sum = dot_of(row, x + static_cast<i64>(token) * of.width, of.width);
    if (threadIdx.x % WARP == 0) {
        float value = load(of.scales + unit) * (sum < 0.0f ? 0.0f : sum);
        store(hidden + static_cast<i64>(token) * of.size + unit, value);
    }
}

SHARED_CONSTANT int UNITS = 8;  // whose rows of `up` are asked for at once

// masks (num_neurons,): bit t where the neuron is expected to fire for token t; a thread a neuron.
template <typename T>
DEVICE void mask_neuron(const LowRank<T>& of, const float* hidden, u32* masks) {
    int n = blockIdx.x * THREADS + threadIdx.x;
    if (n >= of.num_neurons) return;
    u32 mask = 0;
    for (int t = 0; t < of.num_tokens; ++t, hidden += of.size) {
        float score = -load(of.thresholds + n);
        for (int first = 0; first < of.size; first += UNITS) {
            float units[UNITS], weights[UNITS];
#pragma unroll
            for (int i = 0; i < UNITS; ++i) {
                int unit = first + i;
                units[i] = unit < of.size ? load(hidden + unit) : 0.0f;
                i64 at = static_cast<i64>(unit) * of.num_neurons + n;
                weights[i] = units[i] != 0.0f ? number_of(load(of.up + at)) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < UNITS; ++i) {
                if (units[i] != 0.0f) score = fmaf(weights[i], units[i], score);
            }
        }
        if (!(score <= 0.0f)) mask |= 1u << t;  // as above
    }
    store(masks + n, mask);
}

using INT8 = signed char;
using HALF = u16;
#define LOWRANK_HIDDEN(TYPE)                                                                       \
    ENTRY(THREADS)                                                                                 \
    lowrank_hidden_##TYPE(LowRank<TYPE> of, const float* x, float* hidden) {                       \
        hidden_unit(of, x, hidden);                                                                \
    }
#define LOWRANK_MASKS(TYPE)                                                                        \
    ENTRY(THREADS)                                                                                 \
    lowrank_masks_##TYPE(LowRank<TYPE> of, const float* hidden, u32* masks) {                      \
        mask_neuron(of, hidden, masks);                                                            \
    }

// out: how many of the neurons have a mask.
DEVICE void count_of_masks(const u32* masks, int num_neurons, int* out) {
    __shared__ int counts[GROUPS];
    int count = 0;
    for (int first = 0; first < num_neurons; first += LANES) {
        int n = first + threadIdx.x;
        count += __popc(__ballot_sync(ALL_LANES, n < num_neurons && load(masks + n) != 0));
    }
    if (threadIdx.x % WARP == 0) counts[threadIdx.x / WARP] = count;
    __syncthreads();
    for (int group = 1; group < GROUPS; ++group) count += counts[group];
    if (threadIdx.x == 0) store(out, count);
}

#define COUNT_MASKS()                                                                              \
    ENTRY(LANES)                                                                                   \
    count_masks(const u32* masks, int num_neurons, int* out) {                                     \
        count_of_masks(masks, num_neurons, out);                                                   \
    }

// Where CPU services find their lists: ids, token masks (S, row_items), and in cells their length.
struct Lists {
    int* ids;
    u32* masks;
    int* cells;
    i64 row_items;
    int cell_words, length;  // of a service's cells, and which of them
    int stopped;
};

// A block a service: those of its neurons bounds[c] .. bounds[c + 1] - 1 that have a mask, in order.
DEVICE void list_of_service(
    const u32* masks, const int* bounds, const int* told, const Lists& lists) {
    __shared__ int counts[GROUPS];
    if (is_stopped(lists.cells + lists.stopped, load(told))) return;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, count = 0;
    int begin = load(bounds + blockIdx.x), end = load(bounds + blockIdx.x + 1);
    int service = load(told + 3 + blockIdx.x);
    u32 tokens = ALL_LANES >> (32 - load(told + 1));  // others are copies of the last one
    for (int first = begin; first < end; first += LANES) {
        int n = first + threadIdx.x;
        u32 mask = n < end ? load(masks + n) & tokens : 0;
        u32 listed = __ballot_sync(ALL_LANES, mask != 0);
        if (lane == 0) counts[warp] = __popc(listed);
        __syncthreads();
        int place = count + __popc(listed & ((1u << lane) - 1));
        for (int other = 0; other < GROUPS; ++other) {
            if (other < warp) place += counts[other];
            count += counts[other];
        }
        if (mask) {
            store(lists.ids + service * lists.row_items + place, n - begin);
            store(lists.masks + service * lists.row_items + place, mask);
        }
        __syncthreads();  // before the next use of `counts`
    }
    if (threadIdx.x == 0) store(lists.cells + service * lists.cell_words + lists.length, count);
    fence_all();
}

#define LIST_NEURONS()                                                                             \
    ENTRY(LANES)                                                                                   \
    list_neurons(const u32* masks, const int* bounds, const int* told, Lists lists) {              \
        list_of_service(masks, bounds, told, lists);                                               \
    }
