// Activations that nothing quantized where it wrote them.
#include "quantize.cuh"

#define QUANTIZE_VECTORS()                                                                         \
    ENTRY(THREADS)                                                                                 \
    quantize_vectors(const float* x, int width, const Quantized to) {                              \
        int group = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;            \
        if (group >= width / GROUP) return;                                                        \
        i64 token = blockIdx.y;                                                                    \
        float value = load(x + token * width + group * GROUP + lane);                              \
        quantize_group(to, token, width, group, value);                                            \
    }
