// The hot FFN's last kernel: the sum of all runs, each the sum of its parts, in order; where the FFN
// is whole also the layer's output.
//
// A block takes 32 cells of the output; its warps sum eight runs each, the first adds them up.
#include "common.cuh"

constexpr int RUN_PARTS = 4;
constexpr int RUNS_AT_ONCE = 32;  // whose loads are in flight together

// Partials first .. last - 1 of a cell, 0 where there are none.
DEVICE float run_sum(const float* partials, i64 cells, int first, int last) {
    float sums[RUN_PARTS] = {};
#pragma unroll
    for (int i = 0; i < RUN_PARTS; ++i) {
        if (first + i < last) sums[i] = load(partials + (first + i) * cells);
    }
    float sum = sums[0];
#pragma unroll
    for (int i = 1; i < RUN_PARTS; ++i) {
        if (first + i < last) sum += sums[i];
    }
    return sum;
}

// partials (num_partials, cells), of which `run_partials` (RUN_PARTS or 1) are a run; fired_counts
// (num_parts,).
struct PartSums {
    const float* partials;
    const int* fired_counts;
    i64 cells;  // of the output
    int num_partials, run_partials, num_parts;
};

// What an FFN's sum is added to: input (cells,) of the FFN, null where the bare sum is wanted;
// ffn_residual (cells,), null where it is added later; bias (num_blocks, width) or null, block_weights
// (T, num_blocks) or null: all are 1.
struct Residual {
    const float *ffn_residual, *input, *bias, *block_weights;
    float scale;
    int width, num_blocks;
};

// The biases of a token's blocks, in order, as set_bias of numba_kernels.ffn.in_memory.
DEVICE float bias_of(const Residual& to, i64 cell) {
    float sum = 0.0f;
    const float *bias = to.bias + cell % to.width, *weights = to.block_weights;
    if (weights) weights += cell / to.width * to.num_blocks;
    for (int b = 0; b < to.num_blocks; ++b) {
        float weight = weights ? load(weights + b) : 1.0f;
        if (weight != 0.0f) sum += weight * load(bias + static_cast<i64>(b) * to.width);
    }
    return sum;
}

// As merge_partials and merge_normed of numba_kernels.loops.output_sums; a NaN where the input is not
// finite: gates below zero do not fire, which would hide it.
DEVICE float layer_output(const Residual& to, i64 cell, float sum) {
    if (!to.input) return sum;
    float input = load(to.input + cell), bias = to.bias ? bias_of(to, cell) : 0.0f;
    float output = sum + bias;
    if (to.ffn_residual) {
        float ffn_residual = load(to.ffn_residual + cell);
        output = to.scale == 1.0f ? ffn_residual + sum + bias : ffn_residual + to.scale * output;
    }
    return output + (input - input);
}

DEVICE void sum_runs(const PartSums& from, const Residual& to, float* out) {
    __shared__ float sums[RUNS_AT_ONCE][WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    i64 cell = static_cast<i64>(blockIdx.x) * WARP + lane;
    int num_runs = (from.num_partials + from.run_partials - 1) / from.run_partials;
    float total = 0.0f;
    for (int begin = 0; begin < num_runs; begin += RUNS_AT_ONCE) {
#pragma unroll
        for (int i = 0; i < RUNS_AT_ONCE; i += WARPS) {
            int first = (begin + i + warp) * from.run_partials;
            int last = min_of(first + from.run_partials, from.num_partials);
            if (cell >= from.cells) last = first;
            sums[i + warp][lane] = run_sum(from.partials + cell, from.cells, first, last);
        }
        __syncthreads();
        int count = min_of(RUNS_AT_ONCE, num_runs - begin);
        for (int i = 0; warp == 0 && i < count; ++i) total += sums[i][lane];
        __syncthreads();
    }
    if (warp == 0 && cell < from.cells) store(out + cell, layer_output(to, cell, total));
}

// num_fired (2,): neurons that fire, and up rows read, from the two halves of each count.
DEVICE void count_fired(const int* fired_counts, int num_parts, int* num_fired) {
    if (blockIdx.x > 0 || threadIdx.x >= WARP) return;
    int fired = 0, up_read = 0;
    for (int i = threadIdx.x; i < num_parts; i += WARP) {
        int counts = load(fired_counts + i);
        fired += counts & 0xFFFF, up_read += counts >> 16;
    }
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        fired += __shfl_xor_sync(ALL_LANES, fired, offset);
        up_read += __shfl_xor_sync(ALL_LANES, up_read, offset);
    }
    if (threadIdx.x == 0) store(num_fired, fired), store(num_fired + 1, up_read);
}

#define SUM_PARTS()                                                                                \
    ENTRY(THREADS)                                                                                 \
    sum_parts(PartSums from, Residual to, float* out, int* num_fired) {                            \
        count_fired(from.fired_counts, from.num_parts, num_fired);                                 \
        sum_runs(from, to, out);                                                                   \
    }
