// The router of a mixture: which experts a token's FFN computes, and what they weigh, as
// numba_kernels.decode.router; a block a token. Logits are products of gemv.cu.
#include "common.cuh"
#include "layer.cuh"

constexpr int MAX_EXPERTS = 1024;
constexpr float LEAST_SUM = 1e-20f;  // of chosen scores: sigmoids may all be 0

// As in hotcold.numba_kernels.layer_record.
enum RouterScore { SOFTMAX = 0, SIGMOID, SOFTMAX_OF_CHOSEN };

struct RouterScores {
    const float* logits;          // (T, E)
    const float* selection_bias;  // (E,), or null
    const float* shared;          // (T,) logits of the shared expert; null: it weighs 1
};

// The sum or the largest of all threads' values, the same bits in every thread.
template <bool IS_SUM>
DEVICE float over_block(float value) {
    __shared__ float of_warps[WARPS];
    if (IS_SUM) value = warp_sum(value);
#pragma unroll
    for (int offset = WARP / 2; !IS_SUM && offset > 0; offset /= 2) {
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, offset));
    }
    __syncthreads();  // the last call's values have been read
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = value;
    __syncthreads();
    float found = of_warps[0];
    for (int warp = 1; warp < WARPS; ++warp) {
        found = IS_SUM ? found + of_warps[warp] : fmaxf(found, of_warps[warp]);
    }
    return found;
}

DEVICE float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

// The score of one expert; of SOFTMAX, `top` and `total` are of all experts' logits.
DEVICE float score_of(int kind, float logit, float top, float total) {
    if (kind == SOFTMAX) return expf(logit - top) / total;
    return kind == SIGMOID ? sigmoid(logit) : logit;
}

// How many of the others are better; of equal ones the first is.
DEVICE int num_better(const float* values, int count, int own) {
    int found = 0;
    for (int i = 0; i < count; ++i) {
        found += values[i] > values[own] || (values[i] == values[own] && i < own);
    }
    return found;
}

// Lets experts of all but the best groups be -infinity. A group's score is its largest number, or
// the sum of its two largest.
DEVICE void leave_groups(
    const LayerNumbers& layer, bool adds_second, float* choice, float* groups) {
    int size = layer.num_experts / layer.num_groups;
    for (int g = threadIdx.x; g < layer.num_groups; g += THREADS) {
        float first = -infinity(), second = -infinity();
        for (int e = g * size; e < (g + 1) * size; ++e) {
            second = fmaxf(second, fminf(first, choice[e]));
            first = fmaxf(first, choice[e]);
        }
        groups[g] = adds_second && size > 1 ? first + second : first;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < layer.num_experts; e += THREADS) {
        int better = num_better(groups, layer.num_groups, e / size);
        if (better >= layer.num_chosen_groups) choice[e] = -infinity();
    }
    __syncthreads();
}

// weights (T, B): 0 of experts that are not chosen and of blocks that the layer does not have; of
// all experts NaN where a logit is not finite.
DEVICE void choose_experts_of(
    const LayerNumbers& layer, const RouterScores& from, int num_blocks, float* weights) {
    __shared__ float choice[MAX_EXPERTS], values[MAX_EXPERTS];
    int count = layer.num_experts, kind = layer.router_score, token = blockIdx.x;
    const float* logits = from.logits + static_cast<i64>(token) * count;
    weights += static_cast<i64>(token) * num_blocks;
    for (int b = count + threadIdx.x; b < num_blocks; b += THREADS) {
        float share = from.shared ? sigmoid(load(from.shared + token)) : 1.0f;
        store(weights + b, b < layer.num_blocks ? share : 0.0f);
    }
    float top = -infinity(), total = 1.0f, check = 0.0f;
    for (int e = threadIdx.x; e < count; e += THREADS) {
        check += load(logits + e) * 0.0f;
        top = fmaxf(top, load(logits + e));
    }
    check = over_block<true>(check);
    if (check != 0.0f) {
        for (int e = threadIdx.x; e < count; e += THREADS) store(weights + e, check);
        return;
    }
    top = over_block<false>(top);
    if (kind == SOFTMAX) {
        total = 0.0f;
        for (int e = threadIdx.x; e < count; e += THREADS) total += expf(load(logits + e) - top);
        total = over_block<true>(total);
    }
    // Scores grow with logits, which are compared where nothing is added: they are rounded less.
    bool compares_scores = from.selection_bias || layer.num_groups > 1;
    for (int e = threadIdx.x; e < count; e += THREADS) {
        float value = load(logits + e);
        if (compares_scores) value = score_of(kind, value, top, total);
        choice[e] = from.selection_bias ? value + load(from.selection_bias + e) : value;
    }
    __syncthreads();
    if (layer.num_groups > 1) leave_groups(layer, from.selection_bias != nullptr, choice, values);
    float chosen_top = -infinity(), sum = 0.0f;
    for (int e = threadIdx.x; e < count; e += THREADS) {
        bool is_chosen = num_better(choice, count, e) < layer.num_chosen;
        values[e] = is_chosen ? load(logits + e) : -infinity();
        chosen_top = fmaxf(chosen_top, values[e]);
    }
    if (kind == SOFTMAX_OF_CHOSEN) kind = SOFTMAX, top = over_block<false>(chosen_top);
    for (int e = threadIdx.x; e < count; e += THREADS) {
        bool is_chosen = values[e] > -infinity();
        values[e] = is_chosen ? score_of(kind, values[e], top, total) : 0.0f;
        sum += values[e];
    }
    bool is_normed = layer.norms_chosen || layer.router_score == SOFTMAX_OF_CHOSEN;
    float divisor = is_normed ? fmaxf(over_block<true>(sum), LEAST_SUM) : 1.0f;
    for (int e = threadIdx.x; e < count; e += THREADS) {
        store(weights + e, values[e] / divisor * layer.router_scale);
    }
}

#define CHOOSE_EXPERTS()                                                                           \
    ENTRY(THREADS)                                                                                 \
    choose_experts(                                                                                \
        const LayerNumbers layer, RouterScores from, int num_blocks, float* weights) {             \
        choose_experts_of(layer, from, num_blocks, weights);                                       \
    }
