// Softcap, in place: cap * tanh(value / cap).
#include "common.cuh"

#define SOFTCAP()                                                                                  \
    ENTRY(THREADS)                                                                                 \
    softcap(float* values, i64 count, float cap) {                                                 \
        i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;                              \
        if (i < count) store(values + i, cap * tanhf(load_own(values + i) / cap));                 \
    }
