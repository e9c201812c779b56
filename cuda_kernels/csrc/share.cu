// Layers that a GPU shares with CPU services: vectors and flags in memory that both see.
//
// A flag is the mark of a request and a layer, `layer_mark` of numba_kernels.loops.mailbox. `told` is
// on the device, as a graph's arguments never change: the request's number and number of tokens,
// then `sum_order` (actors.protocol.stripes): how many CPU services there are, which, how many steps,
// and the steps.
#include "common.cuh"

constexpr int GIVING_THREADS = 512;
constexpr int MOST_KEPT = 16;  // sums that wait for others, the GPU's own one among them
constexpr int MARK_BITS = 10, ADD = -1;

DEVICE int mark_of(const int* told, int layer) {
    return static_cast<int>((static_cast<i64>(load(told)) << MARK_BITS | (layer + 1)) & 0x7fffffff);
}

struct Vectors {
    const float* from;
    float* to;
    i64 count;
};

DEVICE void give(const Vectors& vectors) {
    for (i64 i = threadIdx.x; i < vectors.count; i += GIVING_THREADS) {
        store(vectors.to + i, load(vectors.from + i));
    }
}

// A service's flag is cells[service * cell_words + output]; cells[stopped] is told as soon as the
// others are not to wait any more.
struct Bells {
    int* cells;
    int cell_words, output, stopped;
    i64 limit_ns;
};

// Whether cells[flag] is `mark`; false once request `number` is stopped, as it is at the limit.
DEVICE bool await_flag(const Bells& bells, int flag, int mark, int number) {
    i64 started = clock_ns();
    while (load_flag(bells.cells + flag) != mark) {
        if (load_flag(bells.cells + bells.stopped) == number) return false;
        if (clock_ns() - started > bells.limit_ns) {
            store_flag(bells.cells + bells.stopped, number);
            return false;
        }
        rest();
    }
    return true;
}

// own (T, width): the GPU's partial output, or null; partials (S, tokens, width), and more of them.
struct Outputs {
    const float *own, *partials, *more;
    i64 service_items;
    int num_services;
};

// What they are added to: ffn_residual (T, width), null where it is added later; input (T, width).
struct Added {
    const float *ffn_residual, *input;
    float scale;
    int width;
    i64 cells;
};

// As merge_partials and merge_normed of numba_kernels.loops.output_sums; a NaN where the input is not
// finite: gates below zero do not fire, which would hide it.
DEVICE float sum_of(const Outputs& from, const Added& to, const int* told, i64 cell) {
    float kept[MOST_KEPT];
    int count = 0;
    if (from.own) kept[count++] = load(from.own + cell);
    // Tokens that fill a step up are copies of its last one.
    i64 token = cell / to.width, last = load(told + 1) - 1;
    i64 place = (token < last ? token : last) * to.width + cell % to.width;
    const int* steps = told + 3 + load(told + 2);
    int num_steps = load(steps);
    for (int i = 1; i <= num_steps; ++i) {
        int step = load(steps + i);
        if (step == ADD) {
            --count;
            kept[count - 1] += kept[count];
            continue;
        }
        bool is_first = step < from.num_services;
        const float* output = is_first ? from.partials : from.more;
        i64 number = is_first ? step : step - from.num_services;
        kept[count++] = load_shared(output + number * from.service_items + place);
    }
    float input = load(to.input + cell), sum;
    if (to.ffn_residual && to.scale == 1.0f) {
        sum = load(to.ffn_residual + cell);
        for (int i = 0; i < count; ++i) sum += kept[i];
    } else {
        sum = kept[0];
        for (int i = 1; i < count; ++i) sum += kept[i];
        if (to.ffn_residual) sum = load(to.ffn_residual + cell) + to.scale * sum;
    }
    return sum + (input - input);
}

// A request that was given up goes on to nobody: others may still read what came before.
#define GIVE_INPUT()                                                                               \
    ENTRY(GIVING_THREADS)                                                                          \
    give_input(                                                                                    \
        Vectors input, Vectors weights, const int* told, int layer, int* given,                    \
        const int* stopped) {                                                                      \
        if (is_stopped(stopped, load(told))) return;                                               \
        give(input);                                                                               \
        give(weights);                                                                             \
        fence_all();                                                                               \
        __syncthreads();                                                                           \
        if (threadIdx.x == 0) store_flag(given, mark_of(told, layer));                             \
    }

#define AWAIT_OUTPUTS()                                                                            \
    ENTRY(WARP)                                                                                    \
    await_outputs(Bells bells, const int* told, int layer) {                                       \
        int number = load(told), mark = mark_of(told, layer), count = load(told + 2);              \
        for (int i = threadIdx.x; i < count; i += WARP) {                                          \
            int flag = load(told + 3 + i) * bells.cell_words + bells.output;                       \
            if (!await_flag(bells, flag, mark, number)) return;                                    \
        }                                                                                          \
    }

#define ADD_OUTPUTS()                                                                              \
    ENTRY(THREADS)                                                                                 \
    add_outputs(Outputs from, Added to, const int* told, float* hidden) {                          \
        i64 cell = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;                           \
        if (cell < to.cells) store(hidden + cell, sum_of(from, to, told, cell));                   \
    }
