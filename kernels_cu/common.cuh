// What differs between CUDA, HIP and the host build, and between GPUs: warp width, lane masks, shuffles, storage types.
// No other kernel file names any of these. The compiler gets -DWARP_SIZE: 32 for NVIDIA and AMD's RDNA, 64 for CDNA.
#pragma once

#if defined(__HIP__) || defined(__HIPCC_RTC__)
#define SHUFFLE_XOR(value, lane_mask) __shfl_xor(value, lane_mask, WARP_SIZE)
#define SYNC_WARP() __builtin_amdgcn_wave_barrier()
#elif defined(HOST_BUILD)
#define SHUFFLE_XOR(value, lane_mask) __shfl_xor_sync(host::ALL_LANES, value, lane_mask)
#define SYNC_WARP() __syncwarp()
#else
#define SHUFFLE_XOR(value, lane_mask) __shfl_xor_sync(0xffffffffu, value, lane_mask)
#define SYNC_WARP() __syncwarp()
#endif

// Dynamic shared memory, as much as the launch asks for, for elements of type T.
#if defined(HOST_BUILD)
#define DYNAMIC_SHARED(T, name) T *name = (T *)host::dynamic_shared()
#else
#define DYNAMIC_SHARED(T, name)                         \
    extern __shared__ __align__(16) char name##_bytes[]; \
    T *name = (T *)name##_bytes
#endif

// Marks a pointer parameter to what the kernel changes, or adds to; others that are not const it writes in full.
#define UPDATED
// Marks one to what the kernel may leave in part unwritten.
#define SCRATCH

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// ---- storage types: arithmetic is in float

struct float16 {
    unsigned short bits;
};
// The upper half of a float.
struct bfloat16 {
    unsigned short bits;
};

template <typename U>
struct is_bfloat16 {
    static const bool value = false;
};
template <>
struct is_bfloat16<bfloat16> {
    static const bool value = true;
};

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_float(bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }

__device__ __forceinline__ float to_float(float16 x) {
#if defined(__CUDACC__)
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#elif defined(HOST_BUILD)
    return host::from_half(x.bits);
#else
    _Float16 h;
    __builtin_memcpy(&h, &x.bits, 2);
    return (float)h;
#endif
}

// to<U>(x): x rounded to nearest, ties to even.
template <typename U>
__device__ __forceinline__ U to(float x);

// Two neighbours of a 16-bit type, by one conversion: those of one number alone run at a quarter of the speed.
template <typename U>
__device__ __forceinline__ unsigned pack(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned y;
    if constexpr (is_bfloat16<U>::value) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
#else
    return to<U>(low).bits | (unsigned)to<U>(high).bits << 16;
#endif
}

// The first or the second of what `pack` packed.
template <typename U>
__device__ __forceinline__ float unpack(unsigned two, int second) {
    return to_float(U{(unsigned short)(two >> 16 * second)});
}

template <>
__device__ __forceinline__ float to<float>(float x) {
    return x;
}

template <>
__device__ __forceinline__ float16 to<float16>(float x) {
    float16 y;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    y.bits = (unsigned short)pack<float16>(x, 0.0f);
#elif defined(__CUDACC__)
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#elif defined(HOST_BUILD)
    y.bits = host::to_half(x);
#else
    _Float16 h = (_Float16)x;
    __builtin_memcpy(&y.bits, &h, 2);
#endif
    return y;
}

template <>
__device__ __forceinline__ bfloat16 to<bfloat16>(float x) {
    bfloat16 y;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    y.bits = (unsigned short)pack<bfloat16>(x, 0.0f);
#else
    unsigned u = __float_as_uint(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) y.bits = (unsigned short)((u >> 16) | 0x40);  // NaN stays NaN
    else y.bits = (unsigned short)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
#endif
    return y;
}

// x as U has it.
template <typename U, int N>
__device__ __forceinline__ void round_to(float (&x)[N]) {
    if constexpr (sizeof(U) == 2 && N % 2 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const unsigned two = pack<U>(x[i], x[i + 1]);
            x[i] = unpack<U>(two, 0), x[i + 1] = unpack<U>(two, 1);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = to_float(to<U>(x[i]));
    }
}

// N neighbouring elements, moved by one load or store; their address must be a multiple of N * sizeof(U).
template <typename U, int N>
struct alignas(sizeof(U) * N) Vector {
    U of[N];
};

template <int N, typename U>
__device__ __forceinline__ void load(float (&x)[N], const U *from) {
    Vector<U, N> v = *(const Vector<U, N> *)from;
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = to_float(v.of[i]);
}

template <int N, typename U>
__device__ __forceinline__ void store(U *there, const float (&x)[N]) {
    Vector<U, N> v;
#pragma unroll
    for (int i = 0; i < N; i++) v.of[i] = to<U>(x[i]);
    *(Vector<U, N> *)there = v;
}

// A matrix in any memory layout, or a batch of them with up to three axes: strides in elements, of the batch axes, of
// the rows, of the columns; 0 repeats.
template <typename U>
struct Strided {
    U *data;
    long long strides[5];
};

// ---- reductions

// The sum over a warp, in every lane. A butterfly: the order of the additions is the same in each lane and each run.
template <typename U>
__device__ __forceinline__ U warp_sum(U x) {
#pragma unroll
    for (int lane_mask = WARP_SIZE / 2; lane_mask > 0; lane_mask /= 2) x += SHUFFLE_XOR(x, lane_mask);
    return x;
}

// NaN if any lane has it.
__device__ __forceinline__ float nan_max(float a, float b) { return b > a || b != b ? b : a; }

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lane_mask = WARP_SIZE / 2; lane_mask > 0; lane_mask /= 2) x = nan_max(x, SHUFFLE_XOR(x, lane_mask));
    return x;
}

// The sum over the `threads` threads of a row of the block, in each of them: threadIdx.x runs along the row,
// threadIdx.y is its number. `threads` is a multiple of the warp. scratch: one element a warp of the block; it may be
// used again only after a barrier, and another scratch must be given to the next call without one between.
template <int threads, typename U>
__device__ __forceinline__ U row_sum(U x, U *scratch) {
    x = warp_sum(x);
    const int warps = threads / WARP_SIZE;
    if (warps == 1) return x;
    U *mine = scratch + threadIdx.y * warps;
    if (threadIdx.x % WARP_SIZE == 0) mine[threadIdx.x / WARP_SIZE] = x;
    __syncthreads();
    x = mine[0];
#pragma unroll
    for (int i = 1; i < warps; i++) x += mine[i];
    return x;
}

template <int threads>
__device__ __forceinline__ float row_max(float x, float *scratch) {
    x = warp_max(x);
    const int warps = threads / WARP_SIZE;
    if (warps == 1) return x;
    float *mine = scratch + threadIdx.y * warps;
    if (threadIdx.x % WARP_SIZE == 0) mine[threadIdx.x / WARP_SIZE] = x;
    __syncthreads();
    x = mine[0];
#pragma unroll
    for (int i = 1; i < warps; i++) x = nan_max(x, mine[i]);
    return x;
}

// The sums over a row of N numbers of each thread, with one barrier for all. scratch: N elements a warp of the block.
template <int threads, int N, typename U>
__device__ __forceinline__ void row_sum(U (&x)[N], U *scratch) {
    const int warps = threads / WARP_SIZE;
    U *mine = scratch + threadIdx.y * warps * N;
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = warp_sum(x[i]);
        if (warps > 1 && threadIdx.x % WARP_SIZE == 0) mine[threadIdx.x / WARP_SIZE * N + i] = x[i];
    }
    if (warps == 1) return;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = mine[i];
#pragma unroll
        for (int j = 1; j < warps; j++) x[i] += mine[j * N + i];
    }
}

// The warps of a block: how many elements a scratch has.
__device__ constexpr int warps_of(int threads) { return threads / WARP_SIZE; }

// ---- rows

// f(i, c) for this thread's vectors of `vec` columns, of a row of C columns that `threads` threads share: the i-th
// begins at column c. At most `items` of them; with items = 0 the row may have any length, and i is always 0.
template <int threads, int vec, int items, typename F>
__device__ __forceinline__ void for_vectors(int C, F f) {
    if (items) {
#pragma unroll
        for (int i = 0; i < items; i++) {
            int c = (i * threads + threadIdx.x) * vec;
            if (c < C) f(i, c);
        }
    } else {
        for (int c = threadIdx.x * vec; c < C; c += threads * vec) f(0, c);
    }
}

// This thread's vectors of a row, read once and kept in registers; with items = 0 they are read when they are wanted.
template <typename U, int threads, int vec, int items>
struct Row {
    const U *row;
    Vector<U, vec> kept[items ? items : 1];

    // Those with columns from begin to end - 1.
    __device__ __forceinline__ void read(const U *from, int end, int begin = 0) {
        row = from;
        if (items)
            for_vectors<threads, vec, items>(end, [&](int i, int c) {
                if (c + vec > begin) kept[i] = *(const Vector<U, vec> *)(row + c);
            });
    }

    __device__ __forceinline__ void get(float (&x)[vec], int i, int c) const { load(x, items ? kept[i].of : row + c); }
};

// A launch's own types, the T of a kernel's signature and the like, follow here: kernel.py puts `using T = float;` in.
