// Addresses in the paged cache of keys and values.
#pragma once
#include "common.cuh"

// Rows of a layer's cache, head_dim items each: (pages, KV, page, head_dim).
struct Cache {
    const int* page_tables;
    int pages_a_slot, page_positions, num_kv_heads;

    DEVICE i64 row(int slot, int position, int kv_head) const {
        i64 entry = static_cast<i64>(slot) * pages_a_slot + position / page_positions;
        i64 page = load(page_tables + entry);
        return (page * num_kv_heads + kv_head) * page_positions + position % page_positions;
    }
};
