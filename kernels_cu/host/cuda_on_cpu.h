// What lets a kernel source compile as C++ for a CPU: CUDA's keywords, indices, barriers, warp intrinsics and atomics,
// on the fibers of runtime.cpp. The compiler gets it before the source, with -DWARP_SIZE=32 or 64.
//
// Where it differs from a GPU: fp32 numbers below the normal range are kept (CuPy compiles CUDA with -ftz=true, which
// makes them zero); exp, tanh and their kin are the C library's, __expf and __fdividef too, which a GPU rounds less
// well; products and sums are fused as this compiler likes. Threads run one at a time, blocks one after another: one
// that spins until another writes never ends.
#pragma once
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS  // C's own header: <cmath> would take most of the time of a build
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <string.h>

#include <type_traits>
#include <utility>

#define HOST_BUILD
#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// One section holds all static shared memory, so that the runtime knows where it is.
#define __shared__ static __attribute__((section("shared_memory")))
// What the runtime does for a kernel is not one of the kernel's accesses.
#define UNSEEN __attribute__((no_sanitize("thread")))
// A last parameter of this kind is the line of the call. Threads meet at a barrier, or lanes in a shuffle, only if they
// come from the same line.
#define PLACE int place = __builtin_LINE()

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
void collective(Lanes lanes, Combine combine, void *mine, int place);
void sync_block(int place);
void sync_warp(Lanes lanes, int place);
void fence();
void *dynamic_shared();
void atomic_access(void *address, int size);
[[noreturn]] void absent_lane(int reader, int from);
int lane();

template <typename V>
struct Exchange {
    V value, result;
    int from;
};

template <typename V>
void exchange(void **arrived, Lanes lanes) {
    for (int i = 0; i < WARP_SIZE; i++) {
        if (!(lanes >> i & 1)) continue;
        auto mine = (Exchange<V> *)arrived[i];
        if (!(lanes >> mine->from & 1)) absent_lane(i, mine->from);
        mine->result = ((Exchange<V> *)arrived[mine->from])->value;
    }
}

template <typename V>
__forceinline__ V shuffle(Lanes lanes, V value, int from, int place) {
    Exchange<V> mine = {value, value, from};
    collective(lanes, exchange<V>, &mine, place);
    return mine.result;
}

struct Vote {
    bool yes;
    Lanes result;
};

inline void count_votes(void **arrived, Lanes lanes) {
    Lanes yes = 0;
    for (int i = 0; i < WARP_SIZE; i++)
        if (lanes >> i & 1) yes |= (Lanes)((Vote *)arrived[i])->yes << i;
    for (int i = 0; i < WARP_SIZE; i++)
        if (lanes >> i & 1) ((Vote *)arrived[i])->result = yes;
}

template <typename V, typename F>
UNSEEN __attribute__((noinline)) V change(V *address, F f) {
    V old = *address;
    *address = f(old);
    return old;
}

template <typename V, typename F>
__forceinline__ V atomic(V *address, F f) {
    atomic_access(address, sizeof(V));
    return change(address, f);
}

template <typename To, typename From>
To bits(From x) {
    To y;
    static_assert(sizeof(x) == sizeof(y), "as many bits");
    memcpy(&y, &x, sizeof(y));
    return y;
}

// float16 in integers, which any compiler has: what the hardware does, to nearest with ties to even.
inline float from_half(unsigned short h) {
    unsigned magnitude = h & 0x7fffu, sign = (unsigned)(h & 0x8000u) << 16;
    float y = bits<float>(magnitude << 13) * 0x1p112f;  // exact, for numbers below the normal range too
    return bits<float>(bits<unsigned>(y) | sign | (magnitude >= 0x7c00u ? 0x7f800000u : 0));
}

inline unsigned short to_half(float x) {
    unsigned u = bits<unsigned>(x), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fffu;
    if (magnitude >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);  // 65520 and more
    // Below float16's normal range: in [0.5, 1) the last place of a float is the smallest float16, and the sum rounds.
    unsigned rounded = magnitude < 0x38800000u ? bits<unsigned>(bits<float>(magnitude) + 0.5f) - 0x3f000000u
                                               : (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
    return (unsigned short)(sign | rounded);
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

__forceinline__ void __syncthreads(PLACE) { host::sync_block(place); }
__forceinline__ void __syncwarp(host::Lanes lanes = host::ALL_LANES, PLACE) { host::sync_warp(lanes, place); }
__forceinline__ void __threadfence() { host::fence(); }

template <typename V>
__forceinline__ V __shfl_sync(host::Lanes lanes, V value, int from, int width = WARP_SIZE, PLACE) {
    return host::shuffle(lanes, value, (host::lane() & -width) | (from & (width - 1)), place);
}
template <typename V>
__forceinline__ V __shfl_xor_sync(host::Lanes lanes, V value, int mask, int width = WARP_SIZE, PLACE) {
    int lane = host::lane(), from = lane ^ mask;
    return host::shuffle(lanes, value, from / width > lane / width ? lane : from, place);
}
template <typename V>
__forceinline__ V __shfl_down_sync(host::Lanes lanes, V value, unsigned by, int width = WARP_SIZE, PLACE) {
    int lane = host::lane();
    return host::shuffle(lanes, value, lane % width + by < (unsigned)width ? lane + by : lane, place);
}
template <typename V>
__forceinline__ V __shfl_up_sync(host::Lanes lanes, V value, unsigned by, int width = WARP_SIZE, PLACE) {
    int lane = host::lane();
    return host::shuffle(lanes, value, (unsigned)(lane % width) >= by ? lane - by : lane, place);
}
__forceinline__ host::Lanes __ballot_sync(host::Lanes lanes, int yes, PLACE) {
    host::Vote mine = {yes != 0, 0};
    host::collective(lanes, host::count_votes, &mine, place);
    return mine.result;
}
__forceinline__ int __any_sync(host::Lanes lanes, int yes, PLACE) { return __ballot_sync(lanes, yes, place) != 0; }
__forceinline__ int __all_sync(host::Lanes lanes, int yes, PLACE) { return __ballot_sync(lanes, yes, place) == lanes; }

// Each gives what was there before; an operand becomes the type of what it changes.
#define ATOMIC(name, result)                                                               \
    template <typename V>                                                                  \
    __forceinline__ V atomic##name(V *address, std::common_type_t<V> x) {                  \
        return host::atomic(address, [x](V old) { return result; });                       \
    }
ATOMIC(Add, old + x)
ATOMIC(Min, x < old ? x : old)
ATOMIC(Max, old < x ? x : old)
ATOMIC(Exch, ((void)old, x))
template <typename V>
__forceinline__ V atomicCAS(V *address, std::common_type_t<V> expected, std::common_type_t<V> x) {
    return host::atomic(address, [=](V old) { return old == expected ? x : old; });
}

inline float __uint_as_float(unsigned x) { return host::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return host::bits<unsigned>(x); }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
template <typename V>
V min(V a, V b) { return b < a ? b : a; }
template <typename V>
V max(V a, V b) { return a < b ? b : a; }
