// Rotates query and key heads of a step in place, all items or the first of each, and writes keys
// and values to the cache.
#include "cache.cuh"
#include "layer.cuh"

template <int FORMAT>
DEVICE void store_item(u8* cache, i64 item, float value) {
    if constexpr (FORMAT == F32) {
        store(reinterpret_cast<float*>(cache) + item, value);
    } else {
        store(reinterpret_cast<u16*>(cache) + item, float_to_finite_half(value));
    }
}

// A thread takes two items of a head: a rotated pair i and half + i, or two that are not rotated.
template <int FORMAT>
DEVICE void rope_store_pair(
    float* qkv, int num_heads, int head_dim, const float* query_table, const float* key_table,
    int half, int slot, int position, const Cache& cache, u8* keys, u8* values, int pair) {
    int pairs = (head_dim + 1) / 2, head = pair / pairs, i = pair % pairs, mate = half + i;
    int num_rotated = num_heads + cache.num_kv_heads;
    bool is_rotated = i < half;
    if (!is_rotated) i += half, mate = i + (head_dim - 2 * half + 1) / 2;
    bool has_mate = mate < head_dim;
    float* vector = qkv + static_cast<i64>(head) * head_dim;
    float a = load_own(vector + i), b = has_mate ? load_own(vector + mate) : 0.0f;
    if (is_rotated && head < num_rotated) {
        const float* table = head < num_heads ? query_table : key_table;
        const float* angle = table + static_cast<i64>(position) * 2 * half;
        float cosine = load(angle + i), sine = load(angle + half + i), first = a;
        a = a * cosine - b * sine;
        b = b * cosine + first * sine;
        store(vector + i, a);
        if (has_mate) store(vector + mate, b);
    }
    if (head < num_heads) return;
    bool is_key = head < num_rotated;
    i64 row = cache.row(slot, position, head - (is_key ? num_heads : num_rotated));
    u8* target = is_key ? keys : values;
    store_item<FORMAT>(target, row * head_dim + i, a);
    if (has_mate) store_item<FORMAT>(target, row * head_dim + mate, b);
}

#define ROPE_STORE(FORMAT)                                                                         \
    ENTRY(THREADS)                                                                                 \
    rope_store_##FORMAT(                                                                           \
        const LayerNumbers layer, float* qkv, const float* query_table, const float* key_table,    \
        int half, const int* positions, const int* slots, const int* page_tables, int pages_a_slot,          \
        int page_positions, u8* keys, u8* values) {                                                \
        int token = blockIdx.y, all_heads = layer.num_heads + 2 * layer.num_kv_heads;              \
        int pair = blockIdx.x * THREADS + threadIdx.x;                                             \
        if (pair >= all_heads * ((layer.head_dim + 1) / 2)) return;                                \
        Cache cache{page_tables, pages_a_slot, page_positions, layer.num_kv_heads};                \
        float* vectors = qkv + static_cast<i64>(token) * all_heads * layer.head_dim;               \
        rope_store_pair<FORMAT>(                                                                   \
            vectors, layer.num_heads, layer.head_dim, query_table, key_table, half,                \
            load(slots + token), load(positions + token), cache, keys, values, pair);                                   \
    }
