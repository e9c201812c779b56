// CUDA's words for a C++ compiler: a fiber for each thread of a block, blocks one after another.
//
// Threads run until they meet others: at a barrier, or where lanes of a warp exchange values. Every
// access to memory is checked: its alignment, that it lies in one of the launch's arrays, and
// that no thread reads or overwrites what another one has written. Threads that wait for each other
// in vain, and lanes that exchange different things, are errors.
#pragma once

#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sched.h>
#include <string>
#include <time.h>
#include <ucontext.h>
#include <type_traits>
#include <utility>
#include <vector>

#define HOTCOLD_EMULATION 1
#define DEVICE inline
#define ENTRY(threads) inline void
#define __shared__ static
#define threadIdx (emulation::current->index)
#define blockIdx (emulation::block_index)

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct uint3 {
    unsigned x, y, z;
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulation {

constexpr int LANES = 32, MOST_THREADS = 1024;
#ifdef __SANITIZE_ADDRESS__
constexpr size_t STACK_BYTES = 1 << 18;
#else
constexpr size_t STACK_BYTES = 1 << 16;
#endif

enum State { READY, AT_BARRIER, IN_EXCHANGE, DONE };

struct Fiber {
    jmp_buf context;
    ucontext_t start;
    std::vector<char> stack;
    bool is_started = false;
    State state = DONE;
    uint3 index{};
    int warp = 0, lane = 0;
    unsigned seen = 0;  // the round that it waits to end
};

// Lanes of a warp meet in rounds; the values of two rounds are kept, for some are a round ahead.
struct Warp {
    uint64_t values[2][LANES];
    int num_arrived, kind;
    unsigned round;
};

struct Buffer {
    const char* begin;
    size_t num_bytes;
    std::vector<uint32_t> writers;  // of each byte, from 1; empty before the first is written
};

inline Fiber fibers[MOST_THREADS];
inline Warp warps[MOST_THREADS / LANES];
inline Fiber* current;
inline uint3 block_index;
inline jmp_buf scheduler;
inline unsigned barrier_round;
inline int num_threads, num_at_barrier;
inline uint32_t first_writer;  // of the block
inline void (*body)(void**);
inline void** arguments;
inline std::vector<Buffer> buffers;
inline char message[256];

__attribute__((noinline)) inline void yield() {
    if (_setjmp(current->context) == 0) _longjmp(scheduler, 1);
}

[[noreturn]] __attribute__((noinline)) inline void fail(const char* what) {
    snprintf(
        message, sizeof message, "%s (block %u %u %u, thread %u)", what, block_index.x,
        block_index.y, block_index.z, current ? current->index.x : 0);
    _longjmp(scheduler, 2);
}

// ---- memory

inline Buffer& buffer_of(const void* at, size_t num_bytes) {
    static size_t last = 0;
    const char* from = static_cast<const char*>(at);
    for (size_t i = 0; i <= buffers.size(); ++i) {
        size_t number = i == 0 ? last : i - 1;
        if (number >= buffers.size()) continue;
        Buffer& buffer = buffers[number];
        if (from < buffer.begin || from + num_bytes > buffer.begin + buffer.num_bytes) continue;
        last = number;
        return buffer;
    }
    fail("an access outside of all arrays");
}

inline uint32_t own_writer() { return first_writer + current->index.x + 1; }

inline void check_read(const void* at, size_t num_bytes, bool may_be_own) {
    if (reinterpret_cast<uintptr_t>(at) % num_bytes) fail("a read that is not aligned");
    Buffer& buffer = buffer_of(at, num_bytes);
    if (buffer.writers.empty()) return;
    size_t first = static_cast<const char*>(at) - buffer.begin;
    for (size_t i = first; i < first + num_bytes; ++i) {
        uint32_t writer = buffer.writers[i];
        if (writer && !(may_be_own && writer == own_writer())) {
            fail(may_be_own ? "a read of what another thread wrote" : "a read of what is written");
        }
    }
}

inline void check_write(const void* at, size_t num_bytes) {
    if (reinterpret_cast<uintptr_t>(at) % num_bytes) fail("a write that is not aligned");
    Buffer& buffer = buffer_of(at, num_bytes);
    if (buffer.writers.empty()) buffer.writers.resize(buffer.num_bytes);
    size_t first = static_cast<const char*>(at) - buffer.begin;
    for (size_t i = first; i < first + num_bytes; ++i) {
        uint32_t& writer = buffer.writers[i];
        if (writer && writer != own_writer()) fail("two threads write to one place");
        writer = own_writer();
    }
}

// ---- threads that meet

// Waits for all lanes of the warp; every one of them brings a value of the same `kind`.
inline const uint64_t* exchange(uint64_t value, int kind) {
    Warp& warp = warps[current->warp];
    unsigned round = warp.round;
    bool is_first = warp.num_arrived == 0;
    if (!is_first && warp.kind != kind) fail("lanes of a warp exchange different things");
    warp.kind = kind;
    warp.values[round & 1][current->lane] = value;
    if (++warp.num_arrived == LANES) {
        warp.num_arrived = 0;
        ++warp.round;
    } else {
        current->state = IN_EXCHANGE;
        current->seen = round;
        yield();
    }
    return warp.values[round & 1];
}

inline bool can_run(const Fiber& fiber) {
    if (fiber.state == IN_EXCHANGE) return warps[fiber.warp].round != fiber.seen;
    if (fiber.state == AT_BARRIER) return barrier_round != fiber.seen;
    return fiber.state == READY;
}

// ---- blocks

inline void run_for_ever() {
    for (;;) {
        body(arguments);
        current->state = DONE;
        yield();
    }
}

__attribute__((noinline)) inline int resume(Fiber& fiber) {
    current = &fiber;
    fiber.state = READY;
    int result = _setjmp(scheduler);
    if (result) return result;
    if (current->is_started) _longjmp(current->context, 1);
    current->is_started = true;
    setcontext(&current->start);
    return 0;
}

inline void prepare(Fiber& fiber, int number) {
    fiber.index = {static_cast<unsigned>(number), 0, 0};
    fiber.warp = number / LANES, fiber.lane = number % LANES;
    fiber.state = READY;
    if (fiber.is_started) return;
    if (fiber.stack.empty()) fiber.stack.resize(STACK_BYTES);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.data();
    fiber.start.uc_stack.ss_size = fiber.stack.size();
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, run_for_ever, 0);
}

inline bool run_block(bool is_reversed) {
    for (int i = 0; i < num_threads; ++i) prepare(fibers[i], i);
    for (int i = 0; i < num_threads / LANES; ++i) warps[i].num_arrived = warps[i].round = 0;
    num_at_barrier = 0, barrier_round = 0;
    for (int num_done = 0; num_done < num_threads;) {
        bool has_moved = false;
        for (int step = 0; step < num_threads; ++step) {
            Fiber& fiber = fibers[is_reversed ? num_threads - 1 - step : step];
            if (fiber.state == DONE || !can_run(fiber)) continue;
            has_moved = true;
            if (resume(fiber) == 2) return false;
            if (fiber.state == DONE) ++num_done;
        }
        if (!has_moved) {
            current = nullptr;
            snprintf(message, sizeof message, "threads of a block wait for others that never come");
            return false;
        }
    }
    return true;
}

struct Launch {
    const char* kinds;  // of the arguments: p(ointer), i(nt32), l(ong), f(loat), s(truct and size)
    void** arguments;
    const void** buffers;
    const size_t* buffer_bytes;
    int num_buffers;
    unsigned grid[3];
    int num_threads;
    int is_reversed;  // last block and thread first
};

inline const char* run(void (*kernel)(void**), const Launch& launch) {
    body = kernel, arguments = launch.arguments, num_threads = launch.num_threads;
    if (num_threads % LANES || num_threads > MOST_THREADS) return "a block of so many threads";
    buffers.clear();
    for (int i = 0; i < launch.num_buffers; ++i) {
        buffers.push_back(
            {static_cast<const char*>(launch.buffers[i]), launch.buffer_bytes[i], {}});
    }
    uint64_t area = uint64_t{launch.grid[0]} * launch.grid[1], all = area * launch.grid[2];
    for (uint64_t step = 0; step < all; ++step) {
        uint64_t number = launch.is_reversed ? all - 1 - step : step;
        block_index.x = number % launch.grid[0];
        block_index.y = number % area / launch.grid[0];
        block_index.z = number / area;
        first_writer = static_cast<uint32_t>(number * num_threads);
        if (run_block(launch.is_reversed)) continue;
        for (Fiber& fiber : fibers) fiber.is_started = false;  // some stand amid a kernel
        return message;
    }
    return nullptr;
}

// ---- kernels by name

template <typename T>
std::string kind_of() {
    if constexpr (std::is_class_v<T>) return "s" + std::to_string(sizeof(T));
    if constexpr (std::is_pointer_v<T>) return "p";
    if constexpr (std::is_same_v<T, float>) return "f";
    return sizeof(T) == 8 ? "l" : "i";
}

template <typename... P>
bool takes(void (*)(P...), const char* kinds) {
    return (kind_of<P>() + ... + std::string()) == kinds;
}

template <typename... P, size_t... I>
void call(void (*kernel)(P...), void** from, std::index_sequence<I...>) {
    kernel(*static_cast<P*>(from[I])...);
}

template <typename... P>
void call(void (*kernel)(P...), void** from) {
    call(kernel, from, std::index_sequence_for<P...>{});
}

template <auto Kernel>
const char* run_kernel(const Launch& launch) {
    if (!takes(Kernel, launch.kinds)) return "arguments of other types than the kernel's";
    return run([](void** from) { call(Kernel, from); }, launch);
}

inline float float_of_half(uint16_t bits) {
    uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    uint32_t wide = sign | (exponent + 112) << 23 | fraction << 13;
    float value;
    if (exponent == 31) wide = sign | 0x7f800000u | fraction << 13;
    if (exponent == 0) {
        value = std::ldexp(static_cast<float>(fraction), -24);
        return sign ? -value : value;
    }
    memcpy(&value, &wide, 4);
    return value;
}

// The nearest of all float16 numbers, ties to even, by float's own rounding.
inline uint16_t half_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t sign = bits >> 16 & 0x8000;
    float size = std::fabs(value);
    if (value != value) return 0x7fff;
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size == 0.0f) return sign;
    int exponent = 0;
    std::frexp(size, &exponent);
    int step = exponent < -13 ? -24 : exponent - 11;  // the distance of float16s there is 2^step
    uint32_t steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, -step)));
    if (exponent < -13) return sign | static_cast<uint16_t>(steps);
    return sign | static_cast<uint16_t>(((exponent + 14) << 10) + steps - 1024);
}

}  // namespace emulation

template <typename T>
inline T load(const T* from) {
    emulation::check_read(from, sizeof(T), false);
    return *from;
}

template <typename T>
inline T load_once(const T* from) {
    return load(from);
}

template <typename T>
inline T load_own(const T* from) {
    emulation::check_read(from, sizeof(T), true);
    return *from;
}

template <typename T>
inline void store(T* to, T value) {
    emulation::check_write(to, sizeof(T));
    *to = value;
}

// What the host writes meanwhile is none of the threads'.
inline float load_shared(const float* from) {
    emulation::buffer_of(from, sizeof(float));
    return *static_cast<const volatile float*>(from);
}

inline int load_flag(const int* from) {
    emulation::buffer_of(from, sizeof(int));
    return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}

inline void store_flag(int* to, int value) {
    emulation::buffer_of(to, sizeof(int));
    __atomic_store_n(to, value, __ATOMIC_RELEASE);
}

inline void fence_all() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline long long clock_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

inline void rest() { sched_yield(); }

inline float half_to_float(uint16_t bits) { return emulation::float_of_half(bits); }
inline uint16_t float_to_half(float value) { return emulation::half_of_float(value); }

inline void __syncthreads() {
    using namespace emulation;
    if (++num_at_barrier == num_threads) {
        num_at_barrier = 0;
        ++barrier_round;
        return;
    }
    current->state = AT_BARRIER;
    current->seen = barrier_round;
    yield();
}

template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int offset) {
    if (mask != 0xffffffffu) emulation::fail("an exchange among some lanes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    const uint64_t* values = emulation::exchange(bits, offset);
    T found;
    memcpy(&found, values + (emulation::current->lane ^ offset), sizeof found);
    return found;
}

inline unsigned __ballot_sync(unsigned mask, bool value) {
    if (mask != 0xffffffffu) emulation::fail("an exchange among some lanes");
    const uint64_t* values = emulation::exchange(value, -1);
    unsigned found = 0;
    for (int lane = 0; lane < emulation::LANES; ++lane) found |= unsigned(values[lane]) << lane;
    return found;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; ++i) {
        sum += int{static_cast<int8_t>(a >> 8 * i)} * static_cast<int8_t>(b >> 8 * i);
    }
    return sum;
}

// Only selectors without the bit that spreads a byte's sign.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    uint64_t bytes = uint64_t{high} << 32 | low;
    unsigned found = 0;
    for (int i = 0; i < 4; ++i) {
        found |= (unsigned(bytes >> 8 * (selector >> 4 * i & 7)) & 255) << 8 * i;
    }
    return found;
}

inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// NaN is 0; beyond int the nearest int.
inline int __float2int_rn(float value) {
    if (value != value) return 0;
    if (value >= 2147483648.0f) return INT32_MAX;
    if (value <= -2147483648.0f) return INT32_MIN;
    return static_cast<int>(std::nearbyint(value));
}
