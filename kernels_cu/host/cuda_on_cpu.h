// What lets a kernel source of kernels_cu/ compile as C++ for a CPU: CUDA's keywords, indices, barriers, warp intrinsics
// and atomics, on the fibers of runtime.cpp. The compiler gets it before the source, with -DWARP_SIZE=32 or 64.
//
// Where it differs from a GPU: numbers below the normal range are kept (CuPy compiles CUDA with -ftz=true, which flushes
// them to zero); exp, tanh and their kin are the C library's; products and sums are fused as this compiler likes.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#define HOST_BUILD
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// One section holds all static shared memory, so that the runtime knows where it is.
#define __shared__ static __attribute__((section("shared_memory")))
// What the runtime does for a kernel is not one of the kernel's accesses.
#define UNSEEN __attribute__((no_sanitize("thread")))

struct dim3 {
    unsigned x, y, z;
};
// Constant for one thread, which is why they are declared so; the runtime sets them whenever it switches to another.
extern "C" const dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace host {
typedef unsigned long long Lanes;
const Lanes ALL_LANES = WARP_SIZE == 64 ? ~0ull : (1ull << (WARP_SIZE % 64)) - 1;

// What a warp does together: each lane of `lanes` arrives with a pointer to what it brings and takes away; the last one
// calls combine(arrived, lanes), where arrived[i] is lane i's pointer, for all.
typedef void (*Combine)(void **arrived, Lanes lanes);
void collective(Lanes lanes, Combine combine, void *mine);
void sync_block();
void sync_warp(Lanes lanes);
void *dynamic_shared();
void atomic_access(void *address, int size);
[[noreturn]] void unread_lane(int lane);
int lane();

template <typename V>
struct Exchange {
    V value, result;
    int from;
};

template <typename V>
UNSEEN void exchange(void **arrived, Lanes lanes) {
    for (int i = 0; i < WARP_SIZE; i++) {
        if (!(lanes >> i & 1)) continue;
        auto mine = (Exchange<V> *)arrived[i];
        if (!(lanes >> mine->from & 1)) unread_lane(mine->from);
        mine->result = ((Exchange<V> *)arrived[mine->from])->value;
    }
}

template <typename V>
UNSEEN V shuffle(Lanes lanes, V value, int from) {
    Exchange<V> mine = {value, value, from};
    collective(lanes, exchange<V>, &mine);
    return mine.result;
}

struct Vote {
    bool yes;
    Lanes result;
};

UNSEEN inline void count_votes(void **arrived, Lanes lanes) {
    Lanes yes = 0;
    for (int i = 0; i < WARP_SIZE; i++)
        if (lanes >> i & 1) yes |= (Lanes)((Vote *)arrived[i])->yes << i;
    for (int i = 0; i < WARP_SIZE; i++)
        if (lanes >> i & 1) ((Vote *)arrived[i])->result = yes;
}

template <typename V, typename F>
UNSEEN V atomic(V *address, F change) {
    atomic_access(address, sizeof(V));
    V old = *address;
    *address = change(old);
    return old;
}

// The arguments of a kernel, each behind a pointer, given to it one by one.
template <typename... A, size_t... I>
UNSEEN void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*(A *)arguments[I]...);
}

template <typename... A>
UNSEEN void call(void (*kernel)(A...), void **arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>());
}
}  // namespace host

#define HOST_KERNEL(name) \
    extern "C" UNSEEN void host_##name(void **arguments) { host::call(name, arguments); }

inline void __syncthreads() { host::sync_block(); }
inline void __syncwarp(host::Lanes lanes = host::ALL_LANES) { host::sync_warp(lanes); }
inline void __threadfence() {}

template <typename V>
V __shfl_sync(host::Lanes lanes, V value, int from, int width = WARP_SIZE) {
    return host::shuffle(lanes, value, host::lane() / width * width + from % width);
}
template <typename V>
V __shfl_xor_sync(host::Lanes lanes, V value, int mask, int width = WARP_SIZE) {
    int lane = host::lane(), from = lane ^ mask;
    return host::shuffle(lanes, value, from / width > lane / width ? lane : from);
}
template <typename V>
V __shfl_down_sync(host::Lanes lanes, V value, int by, int width = WARP_SIZE) {
    int lane = host::lane();
    return host::shuffle(lanes, value, lane % width + by < width ? lane + by : lane);
}
template <typename V>
V __shfl_up_sync(host::Lanes lanes, V value, int by, int width = WARP_SIZE) {
    int lane = host::lane();
    return host::shuffle(lanes, value, lane % width >= by ? lane - by : lane);
}
UNSEEN inline host::Lanes __ballot_sync(host::Lanes lanes, int yes) {
    host::Vote mine = {yes != 0, 0};
    host::collective(lanes, host::count_votes, &mine);
    return mine.result;
}
inline int __any_sync(host::Lanes lanes, int yes) { return __ballot_sync(lanes, yes) != 0; }
inline int __all_sync(host::Lanes lanes, int yes) { return __ballot_sync(lanes, yes) == lanes; }

template <typename V>
UNSEEN V atomicAdd(V *address, V x) {
    return host::atomic(address, [x](V old) { return old + x; });
}
template <typename V>
UNSEEN V atomicMax(V *address, V x) {
    return host::atomic(address, [x](V old) { return old > x ? old : x; });
}
template <typename V>
UNSEEN V atomicExch(V *address, V x) {
    return host::atomic(address, [x](V) { return x; });
}
template <typename V>
UNSEEN V atomicCAS(V *address, V expected, V x) {
    return host::atomic(address, [=](V old) { return old == expected ? x : old; });
}

template <typename To, typename From>
UNSEEN To host_bits(From x) {
    To y;
    memcpy(&y, &x, sizeof(y));
    return y;
}
inline float __uint_as_float(unsigned x) { return host_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return host_bits<unsigned>(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
template <typename V>
V min(V a, V b) { return b < a ? b : a; }
template <typename V>
V max(V a, V b) { return a < b ? b : a; }
