// Quantized activations: groups of 32 numbers with a scale each, the same values as of
// numba_kernels.decode.vectors. A warp takes a group.
//
//     scale = max |x| / 127, value = x / scale rounded to the nearest, ties to even
//
// A NaN makes its group's scale NaN. Rows with minima also need each group's sum of scale * value.
#include "formats.cuh"

DEVICE float larger_or_nan(float a, float b) { return a > b || a != a ? a : b; }

DEVICE void quantize_group(
    const float* x, int width, int group, u8* values, float* scales, float* sums) {
    int lane = threadIdx.x % WARP, groups = width / GROUP;
    float value = load(x + group * GROUP + lane), largest = fabsf(value);
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        largest = larger_or_nan(largest, __shfl_xor_sync(ALL_LANES, largest, offset));
    }
    float inverse = largest == 0.0f ? 0.0f : 127.0f / largest;
    int code = __float2int_rn(value * inverse);
    int chunk = group / CHUNK_GROUPS, size = chunk_size(chunk, groups);
    int place = chunk * CHUNK + lane / 4 * 4 * size + 4 * (group % CHUNK_GROUPS) + lane % 4;
    store(values + place, static_cast<u8>(code & 0xff));
    float sum = warp_sum(static_cast<float>(code));
    if (lane != 0) return;
    store(scales + group, largest / 127.0f);
    store(sums + group, sum * (largest / 127.0f));
}

#define QUANTIZE_VECTORS()                                                                         \
    ENTRY(THREADS)                                                                                 \
    quantize_vectors(const float* x, int width, u8* values, float* scales, float* sums) {          \
        i64 token = blockIdx.y;                                                                    \
        int groups = width / GROUP, group = blockIdx.x * WARPS + threadIdx.x / WARP;               \
        if (group >= groups) return;                                                               \
        quantize_group(                                                                            \
            x + token * width, width, group, values + token * width, scales + token * groups,      \
            sums + token * groups);                                                                \
    }
