// RMSNorm and LayerNorm of a token's numbers, or of a part of them; a block each. `out` may be `x`.
//
//     out = norm(x)    or residual + factor * norm(x)    without weights norm(x) = x
//
// Where `to` says so, `out` is quantized too: a warp's numbers of a turn are a group.
// An RMSNorm has the bits of lane_rms_norm_kernel of numba_kernels.decode.norm.
#include "common.cuh"
#include "layer.cuh"
#include "quantize.cuh"

constexpr int NORM_THREADS = 512;
enum NormKind { RMS_NORM = 0, LAYER_NORM = 1 };

// The sum of all threads' values, the same bits in every thread.
DEVICE float block_sum(float value) {
    __shared__ float sums[NORM_THREADS / WARP];
    value = warp_sum(value);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = value;
    __syncthreads();
    float total = 0.0f;
    for (int warp = 0; warp < NORM_THREADS / WARP; ++warp) total += sums[warp];
    __syncthreads();  // before the next use of `sums`
    return total;
}

DEVICE void norm_token(
    int kind, const float* x, const float* weight, const float* bias, float epsilon, int width,
    const float* residual, float factor, float* out, const Quantized& to) {
    float shift = 0.0f, scale = 1.0f;
    if (weight) {
        float sum = 0.0f, squares = 0.0f;
        if (kind == LAYER_NORM) {
            for (int i = threadIdx.x; i < width; i += NORM_THREADS) sum += load_own(x + i);
            shift = block_sum(sum) / width;
        }
        for (int i = threadIdx.x; i < width; i += NORM_THREADS) {
            float value = load_own(x + i) - shift;
            squares += value * value;
        }
        scale = 1.0f / sqrtf(block_sum(squares) / width + epsilon);
    }
    for (int i = threadIdx.x; i < width; i += NORM_THREADS) {
        float value = load_own(x + i);
        if (weight) value = (value - shift) * scale * load(weight + i);
        if (weight && bias) value += load(bias + i);
        if (residual) value = load(residual + i) + factor * value;
        store(out + i, value);
        if (to.values) quantize_group(to, blockIdx.x, width, i / GROUP, value);
    }
}

#define NORM_TOKENS()                                                                              \
    ENTRY(NORM_THREADS)                                                                            \
    norm_tokens(                                                                                   \
        const LayerNumbers layer, int kind, const float* x, const float* weight,                   \
        const float* bias, int width, i64 row_items, const float* residual, float* out,            \
        const Quantized to) {                                                                      \
        i64 start = blockIdx.x * row_items + static_cast<i64>(blockIdx.y) * width;                 \
        const float* added = residual ? residual + start : nullptr;                                \
        norm_token(                                                                                \
            kind, x + start, weight, bias, layer.norm_eps, width, added, layer.residual_scale,     \
            out + start, to);                                                                      \
    }
