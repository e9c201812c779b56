// Decode attention, grouped-query: each token's heads over the cached positions up to its own, or
// with a window over the last of them.
//
// Positions are cut into splits of 128, whatever the sequence's length. A block takes one split,
// one token and up to QUERIES heads of a key-value head; a second kernel merges the splits in
// order. So the order of a token's sums does not depend on its batch-mates.
#include "cache.cuh"
#include "formats.cuh"
#include "layer.cuh"
#include "quantize.cuh"

constexpr int SPLIT = THREADS;  // positions
constexpr int ITEMS = 8;        // of a head that a lane holds; LANES lanes hold a head
constexpr int MAX_HEAD_DIM = WARP * ITEMS;

struct Step {
    LayerNumbers layer;
    const float* qkv;
    const int* positions;
    const int* slots;
    int num_splits;

    DEVICE int last_position(int token) const { return load(positions + token); }
    DEVICE int first_position(int token) const {
        int beyond = last_position(token) + 1 - layer.window;
        return layer.window > 0 && beyond > 0 ? beyond : 0;
    }
    DEVICE float capped(float score) const {
        float cap = layer.softcap;
        return cap > 0.0f ? cap * tanhf(score / cap) : score;
    }
    DEVICE const float* query(int token, int head) const {
        i64 all_heads = layer.num_heads + 2 * layer.num_kv_heads;
        return qkv + (token * all_heads + head) * layer.head_dim;
    }
    // A split's sum of values, its largest score, and its sum of exponentials.
    DEVICE i64 partial(int token, int head, int split) const {
        i64 row = (static_cast<i64>(token) * layer.num_heads + head) * num_splits + split;
        return row * (layer.head_dim + 2);
    }
};

// What a block keeps of its split.
template <int LANES, int QUERIES>
struct Shared {
    i64 rows[SPLIT];  // of the cache
    float scores[QUERIES][SPLIT];
    float tops[QUERIES], totals[QUERIES];
    float sums[WARPS][QUERIES][LANES * ITEMS];
};

// Items `begin` .. `begin` + 7 of a row of the cache, zeros beyond its end.
template <int FORMAT, bool VECTOR>
DEVICE void cache_items(const u8* cache, i64 row, int head_dim, int begin, float (&out)[ITEMS]) {
    const u8* from = cache + row * head_dim * (16 / items_of(FORMAT));
#pragma unroll
    for (int i = 0; i < ITEMS; i += items_of(FORMAT)) {
        float some[items_of(FORMAT)];
        uint4 piece = make_uint4(0, 0, 0, 0);
        if (begin + i < head_dim) {
            piece = float_piece<FORMAT, VECTOR, false>(from, begin + i, head_dim);
        }
        widen_piece<FORMAT>(piece, some);
#pragma unroll
        for (int j = 0; j < items_of(FORMAT); ++j) out[i + j] = some[j];
    }
}

// A thread's place: positions first, first + STRIDE, ... of the split, items begin .. begin + 7.
template <int LANES>
struct Place {
    static constexpr int STRIDE = THREADS / LANES;
    static constexpr int AHEAD = 4;  // positions in flight
    int lane, first, begin;

    DEVICE Place() {
        lane = threadIdx.x % LANES, first = threadIdx.x / LANES, begin = lane * ITEMS;
    }
};

// scores[q][p] = scale * key of position p . query q; all lanes take part in every round.
template <int FORMAT, bool VECTOR, int LANES, int QUERIES>
DEVICE void score(
    const u8* keys, const Step& step, int count, const float (&queries)[QUERIES][ITEMS],
    Shared<LANES, QUERIES>& shared) {
    using Own = Place<LANES>;
    Own place;
    for (int round = 0; round < count; round += Own::STRIDE * Own::AHEAD) {
        float items[Own::AHEAD][ITEMS];
#pragma unroll
        for (int u = 0; u < Own::AHEAD; ++u) {
            int p = round + u * Own::STRIDE + place.first;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) items[u][i] = 0.0f;
            if (p < count) {
                cache_items<FORMAT, VECTOR>(
                    keys, shared.rows[p], step.layer.head_dim, place.begin, items[u]);
            }
        }
#pragma unroll
        for (int u = 0; u < Own::AHEAD; ++u) {
            int p = round + u * Own::STRIDE + place.first;
#pragma unroll
            for (int q = 0; q < QUERIES; ++q) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < ITEMS; ++i) sum = fmaf(items[u][i], queries[q][i], sum);
#pragma unroll
                for (int offset = LANES / 2; offset > 0; offset /= 2) {
                    sum += __shfl_xor_sync(ALL_LANES, sum, offset);
                }
                if (place.lane == 0 && p < count) {
                    shared.scores[q][p] = step.capped(sum * step.layer.scale);
                }
            }
        }
    }
}

// scores[q] = exp(scores[q] - their largest); a warp takes every fourth query.
template <int LANES, int QUERIES>
DEVICE void exponentials(int count, Shared<LANES, QUERIES>& shared) {
    int lane = threadIdx.x % WARP;
    for (int q = threadIdx.x / WARP; q < QUERIES; q += WARPS) {
        float top = -infinity(), total = 0.0f;
        for (int p = lane; p < count; p += WARP) top = fmaxf(top, shared.scores[q][p]);
#pragma unroll
        for (int offset = WARP / 2; offset > 0; offset /= 2) {
            top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, offset));
        }
        for (int p = lane; p < count; p += WARP) {
            float value = expf(shared.scores[q][p] - top);
            shared.scores[q][p] = value;
            total += value;
        }
        total = warp_sum(total);
        if (lane == 0) shared.tops[q] = top, shared.totals[q] = total;
    }
}

// sums[warp][q] = sum over the warp's positions of scores[q][p] * value of position p.
template <int FORMAT, bool VECTOR, int LANES, int QUERIES>
DEVICE void weigh(const u8* values, const Step& step, int count, Shared<LANES, QUERIES>& shared) {
    using Own = Place<LANES>;
    Own place;
    float sums[QUERIES][ITEMS] = {};
    for (int round = place.first; round < count; round += Own::STRIDE * Own::AHEAD) {
        float items[Own::AHEAD][ITEMS];
#pragma unroll
        for (int u = 0; u < Own::AHEAD; ++u) {
            int p = round + u * Own::STRIDE;
            if (p >= count) continue;
            cache_items<FORMAT, VECTOR>(
                values, shared.rows[p], step.layer.head_dim, place.begin, items[u]);
        }
#pragma unroll
        for (int u = 0; u < Own::AHEAD; ++u) {
            int p = round + u * Own::STRIDE;
            if (p >= count) continue;
#pragma unroll
            for (int q = 0; q < QUERIES; ++q) {
                float share = shared.scores[q][p];
#pragma unroll
                for (int i = 0; i < ITEMS; ++i) sums[q][i] = fmaf(share, items[u][i], sums[q][i]);
            }
        }
    }
#pragma unroll
    for (int q = 0; q < QUERIES; ++q) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            float sum = sums[q][i];
#pragma unroll
            for (int offset = LANES; offset < WARP; offset *= 2) {
                sum += __shfl_xor_sync(ALL_LANES, sum, offset);
            }
            if (threadIdx.x % WARP < LANES) {
                shared.sums[threadIdx.x / WARP][q][place.begin + i] = sum;
            }
        }
    }
}

// One split of one token for heads first_head .. first_head + num_queries - 1 of a key-value head.
template <int FORMAT, bool VECTOR, int LANES, int QUERIES>
DEVICE void attend_split(
    const Step& step, const Cache& cache, const u8* keys, const u8* values, int token, int split,
    int kv_head, int first_head, int num_queries, float* partials) {
    __shared__ Shared<LANES, QUERIES> shared;
    int end = min_of((split + 1) * SPLIT, step.last_position(token) + 1);
    int begin = split * SPLIT, first = step.first_position(token);
    begin = begin < first ? first : begin;
    int count = end - begin;
    if (count <= 0) return;
    int thread = threadIdx.x;
    if (thread < count) {
        shared.rows[thread] = cache.row(load(step.slots + token), begin + thread, kv_head);
    }
    float queries[QUERIES][ITEMS];
    Place<LANES> place;
#pragma unroll
    for (int q = 0; q < QUERIES; ++q) {
        const float* query = step.query(token, first_head + min_of(q, num_queries - 1));
#pragma unroll
        for (int i = 0; i < ITEMS; i += 4) {
            float four[4] = {};
            if (place.begin + i < step.layer.head_dim) {
                load_floats<4, VECTOR>(query, place.begin + i, step.layer.head_dim, four);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) queries[q][i + j] = four[j];
        }
    }
    __syncthreads();
    score<FORMAT, VECTOR, LANES, QUERIES>(keys, step, count, queries, shared);
    __syncthreads();
    exponentials<LANES, QUERIES>(count, shared);
    __syncthreads();
    weigh<FORMAT, VECTOR, LANES, QUERIES>(values, step, count, shared);
    __syncthreads();
    for (int i = thread; i < num_queries * step.layer.head_dim; i += THREADS) {
        int q = i / step.layer.head_dim, item = i % step.layer.head_dim;
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += shared.sums[warp][q][item];
        store(partials + step.partial(token, first_head + q, split) + item, sum);
    }
    if (thread < num_queries) {
        float* values = partials + step.partial(token, first_head + thread, split);
        float* last = values + step.layer.head_dim;
        store(last, shared.tops[thread]);
        store(last + 1, shared.totals[thread]);
    }
}

// The largest of all threads' values.
DEVICE float block_largest(float value) {
    __shared__ float of_warps[WARPS];
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, offset));
    }
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = value;
    __syncthreads();
    for (int warp = 0; warp < WARPS; ++warp) value = fmaxf(value, of_warps[warp]);
    return value;
}

// out[t, h] = the splits' sums in order, each rescaled from its own largest score to the overall.
// A head's sink, a logit without a value, joins the sum of exponentials.
DEVICE void merge_head(
    const Step& step, const float* partials, const float* sinks, float* out, const Quantized& to) {
    __shared__ float shares[THREADS], totals[THREADS];
    int head = blockIdx.x, token = blockIdx.y, size = step.layer.head_dim, thread = threadIdx.x;
    int first_split = step.first_position(token) / SPLIT;
    int splits = step.last_position(token) / SPLIT + 1 - first_split;
    const float* first = partials + step.partial(token, head, first_split);
    float sink = sinks ? load(sinks + head) : -infinity();
    float top = sink, total = 0.0f, sums[MAX_HEAD_DIM / THREADS] = {};
    for (int s = thread; s < splits; s += THREADS) {
        top = fmaxf(top, load(first + static_cast<i64>(s) * (size + 2) + size));
    }
    top = block_largest(top);
    for (int begin = 0; begin < splits; begin += THREADS) {
        const float* parts = first + static_cast<i64>(begin) * (size + 2);
        int count = min_of(THREADS, splits - begin);
        if (thread < count) {
            const float* last = parts + thread * (size + 2) + size;
            shares[thread] = expf(load(last) - top);
            totals[thread] = load(last + 1);
        }
        __syncthreads();
#pragma unroll 4
        for (int s = 0; s < count; ++s) {
            total = fmaf(shares[s], totals[s], total);
#pragma unroll
            for (int j = 0; j < MAX_HEAD_DIM / THREADS; ++j) {
                int item = thread + j * THREADS;
                if (item >= size) continue;
                sums[j] = fmaf(shares[s], load(parts + s * (size + 2) + item), sums[j]);
            }
        }
        __syncthreads();
    }
    if (sinks) total += expf(sink - top);
    float* target = out + (static_cast<i64>(token) * step.layer.num_heads + head) * size;
#pragma unroll
    for (int j = 0; j < MAX_HEAD_DIM / THREADS; ++j) {
        int item = thread + j * THREADS;
        if (item >= size) continue;
        float value = sums[j] / total;
        store(target + item, value);
        if (!to.values) continue;  // else heads are whole groups
        quantize_group(to, token, step.layer.num_heads * size, (head * size + item) / GROUP, value);
    }
}

#define ATTEND_SPLITS(FORMAT, VECTOR, LANES, QUERIES)                                              \
    ENTRY(THREADS)                                                                                 \
    attend_splits_##FORMAT##_##VECTOR##_##LANES##_##QUERIES(                                       \
        const LayerNumbers layer, const float* qkv, const u8* keys, const u8* values,              \
        const int* positions, const int* slots, const int* page_tables, int pages_a_slot,          \
        int page_positions, int num_splits, float* partials) {                                     \
        Step step{layer, qkv, positions, slots, num_splits};                                       \
        Cache cache{page_tables, pages_a_slot, page_positions, layer.num_kv_heads};                \
        int group = layer.num_heads / layer.num_kv_heads, tiles = (group + QUERIES - 1) / QUERIES; \
        int kv_head = blockIdx.x / tiles, first = blockIdx.x % tiles * QUERIES;                    \
        attend_split<FORMAT, VECTOR, LANES, QUERIES>(                                              \
            step, cache, keys, values, blockIdx.y, blockIdx.z, kv_head, kv_head * group + first,   \
            min_of(QUERIES, group - first), partials);                                             \
    }

#define MERGE_SPLITS()                                                                             \
    ENTRY(THREADS)                                                                                 \
    merge_splits(                                                                                  \
        const LayerNumbers layer, const float* partials, const float* sinks,                       \
        const int* positions, int num_splits, float* out, const Quantized to) {                    \
        Step step{layer, nullptr, positions, nullptr, num_splits};                                 \
        merge_head(step, partials, sinks, out, to);                                                \
    }

DEVICE float block_sum(float value) {
    __shared__ float of_warps[WARPS];
    value = warp_sum(value);
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = value;
    __syncthreads();
    float total = 0.0f;
    for (int warp = 0; warp < WARPS; ++warp) total += of_warps[warp];
    return total;
}

// A token's products with the keys of `length` positions from `first` on → what their values weigh,
// 0 of those that it does not see. A block a row: (KV, T, heads of a key-value head).
template <typename T>
DEVICE void weigh_positions(
    const Step& step, const float* products, const float* sinks, int num_rows, int first,
    int length, T* out) {
    int group = step.layer.num_heads / step.layer.num_kv_heads;
    int token = blockIdx.x / group, head = blockIdx.y * group + blockIdx.x % group;
    i64 start = (static_cast<i64>(blockIdx.y) * num_rows + blockIdx.x) * length;
    int last = step.last_position(token) - first, begin = step.first_position(token) - first;
    auto score = [&](int p) { return step.capped(load(products + start + p) * step.layer.scale); };
    float sink = sinks ? load(sinks + head) : -infinity(), top = sink, total = 0.0f;
    for (int p = begin + threadIdx.x; p <= last; p += THREADS) top = fmaxf(top, score(p));
    top = block_largest(top);
    for (int p = begin + threadIdx.x; p <= last; p += THREADS) total += expf(score(p) - top);
    total = block_sum(total) + (sinks ? expf(sink - top) : 0.0f);
    for (int p = threadIdx.x; p < length; p += THREADS) {
        float weight = p < begin || p > last ? 0.0f : expf(score(p) - top) / total;
        if constexpr (sizeof(T) == 4) {
            store(out + start + p, weight);
        } else {
            store(out + start + p, float_to_half(weight));
        }
    }
}

using WEIGHTS_F32 = float;
using WEIGHTS_F16 = u16;
#define WEIGH_POSITIONS(FORMAT)                                                                    \
    ENTRY(THREADS)                                                                                 \
    weigh_positions_##FORMAT(                                                                      \
        const LayerNumbers layer, const float* products, const float* sinks,                       \
        const int* positions, int num_rows, int first, int length, WEIGHTS_##FORMAT* out) {        \
        Step step{layer, nullptr, positions, nullptr, 0};                                          \
        weigh_positions(step, products, sinks, num_rows, first, length, out);                      \
    }
