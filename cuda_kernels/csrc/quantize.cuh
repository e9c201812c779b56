// Quantized activations: groups of 32 numbers with a scale each, the same values as of
// numba_kernels.decode.vectors. A warp takes a group.
//
//     scale = max |x| / 127, value = x / scale rounded to the nearest, ties to even
//
// A NaN makes its group's scale NaN. Rows with minima also need each group's sum of scale * value.
#pragma once
#include "formats.cuh"

// Where (T, width) of them go, as `Input` has them; `values` null: nowhere.
struct Quantized {
    u8* values;
    float* scales;
    float* sums;
};

DEVICE float larger_or_nan(float a, float b) { return a > b || a != a ? a : b; }

// Group `group` of a token's `width` numbers, of which the warp's lanes have one each.
DEVICE void quantize_group(const Quantized& to, i64 token, int width, int group, float value) {
    int lane = threadIdx.x % WARP, groups = width / GROUP;
    float largest = fabsf(value);
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        largest = larger_or_nan(largest, __shfl_xor_sync(ALL_LANES, largest, offset));
    }
    float inverse = largest == 0.0f ? 0.0f : 127.0f / largest;
    int code = __float2int_rn(value * inverse);
    int chunk = group / CHUNK_GROUPS, size = chunk_size(chunk, groups);
    int place = chunk * CHUNK + lane / 4 * 4 * size + 4 * (group % CHUNK_GROUPS) + lane % 4;
    store(to.values + token * width + place, static_cast<u8>(code & 0xff));
    float sum = warp_sum(static_cast<float>(code));
    if (lane != 0) return;
    store(to.scales + token * groups + group, largest / 127.0f);
    store(to.sums + token * groups + group, sum * (largest / 127.0f));
}
