// What differs between CUDA and HIP, and between GPUs: warp width, lane masks, shuffles, storage types.
// No other file names any of these.
#pragma once

#if defined(__HIP__) || defined(__HIPCC_RTC__)
#ifndef WARP_SIZE
#define WARP_SIZE 64  // gfx9; RDNA compiles with -DWARP_SIZE=32
#endif
#define SHUFFLE_XOR(value, lane_mask) __shfl_xor(value, lane_mask, WARP_SIZE)
#else
#define WARP_SIZE 32
#define SHUFFLE_XOR(value, lane_mask) __shfl_xor_sync(0xffffffffu, value, lane_mask)
#endif

// bfloat16 as it is stored: the upper half of a float. Both compilers have a type of their own for it, not both everywhere.
struct bfloat16 {
    unsigned short bits;
};

__device__ inline float to_float(float x) { return x; }

__device__ inline float to_float(bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }

// Rounds to nearest, ties to even; NaN stays NaN.
__device__ inline bfloat16 to_bfloat16(float x) {
    unsigned u = __float_as_uint(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {(unsigned short)((u >> 16) | 0x40)};
    return {(unsigned short)((u + 0x7fffu + ((u >> 16) & 1)) >> 16)};
}

// The sum over a warp, in every lane. A butterfly: the order of the additions is the same in each lane and each run.
template <typename T>
__device__ inline T warp_sum(T x) {
#pragma unroll
    for (int lane_mask = WARP_SIZE / 2; lane_mask > 0; lane_mask /= 2) x += SHUFFLE_XOR(x, lane_mask);
    return x;
}

template <typename T>
__device__ inline T warp_max(T x) {
#pragma unroll
    for (int lane_mask = WARP_SIZE / 2; lane_mask > 0; lane_mask /= 2) {
        T other = SHUFFLE_XOR(x, lane_mask);
        x = other > x ? other : x;
    }
    return x;
}
