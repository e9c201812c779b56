// Shared by all kernels: types, memory access, conversions, warp sums.
//
// It includes no header of CUDA, so NVRTC needs none. Under HOTCOLD_EMULATION the same source is
// compiled for the CPU, where every access below is checked.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

#define SHARED_CONSTANT [[maybe_unused]] constexpr

SHARED_CONSTANT int WARP = 32;
SHARED_CONSTANT int THREADS = 128;  // of a block, where nothing else is said
SHARED_CONSTANT int WARPS = THREADS / WARP;
SHARED_CONSTANT u32 ALL_LANES = 0xffffffffu;

#ifdef HOTCOLD_EMULATION
#include "emulation.h"
#else
#define DEVICE __device__ __forceinline__
#define ENTRY(threads) extern "C" __global__ void __launch_bounds__(threads)

// Memory that no thread writes while the kernel runs.
template <typename T>
DEVICE T load(const T* from) {
    return __ldg(from);
}

// `load` of what is read once: the first to be evicted from the caches.
template <typename T>
DEVICE T load_once(const T* from) {
    return __ldcs(from);
}

// Memory that only the calling thread writes.
template <typename T>
DEVICE T load_own(const T* from) {
    return *from;
}

template <typename T>
DEVICE void store(T* to, T value) {
    *to = value;
}

// A number that the host writes.
DEVICE float load_shared(const float* from) { return __ldcv(from); }

// A word that the host reads and writes meanwhile: what is behind it is there when it is.
DEVICE int load_flag(const int* from) {
    int value;
    asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

DEVICE void store_flag(int* to, int value) {
    asm volatile("st.release.sys.global.s32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}

// What this thread has written is there for the host before what it writes next.
DEVICE void fence_all() { __threadfence_system(); }

DEVICE i64 clock_ns() {
    i64 value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
}

// Between polls of a flag.
DEVICE void rest() { __nanosleep(100); }

DEVICE float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Rounded to the nearest, ties to even.
DEVICE u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

// A NaN where the nearest float16 would be infinite: products of an infinity may be one of any
// sign, and hide in what is cut off, while a NaN stays one.
DEVICE u16 float_to_finite_half(float value) {
    return float_to_half(fabsf(value) < 65520.0f ? value : __uint_as_float(0x7fc00000u));
}

// Whether request `number` was given up; the same for all threads of a block.
DEVICE bool is_stopped(const int* stopped, int number) {
    __shared__ int is_so;
    if (threadIdx.x == 0) is_so = load_flag(stopped) == number;
    __syncthreads();
    return is_so;
}

// Written by cuda_kernels/format_header.py: it is in no file.
#include "format_table.cuh"

DEVICE int min_of(int a, int b) { return a < b ? a : b; }

DEVICE float infinity() { return __uint_as_float(0x7f800000u); }

DEVICE float bfloat16_to_float(u32 bits) { return __uint_as_float(bits << 16); }

// Byte `place` of `word`, which is unsigned, as a float: the byte becomes the lowest of 2^23's
// mantissa. Conversions of integers have a quarter of the rate of these two, or less.
DEVICE float unsigned_byte(u32 word, int place) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | place)) - 8388608.0f;
}

// The sum of all lanes' values, the same bits in every lane.
DEVICE float warp_sum(float value) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(ALL_LANES, value, offset);
    }
    return value;
}
