// gelu_fwd: y = GELU(x);  gelu_bwd: dx = dy GELU'(x)
// Shapes    x, y, dx, dy (n,) T
// Launch    a thread for VEC elements: grid ceil(n / (VEC * blockDim)); block 256; no shared memory
// Memory    forward reads x, writes y; backward reads dy and x, writes dx; about 40 operations an element
// Numerics  fp32. The exact form takes the normal distribution's tail from erfc, which keeps small results right
// Requires  VEC > 1: pointers that are multiples of VEC * sizeof(T); TANH is 1 for the tanh form, else 0
// Source    arXiv:1606.08415; the formulas of tinygrad_gpu/ops/gelu.py
#include "common.cuh"

#define ROOT 0.7978845608028654f  // sqrt(2 / pi)
#define CUBIC 0.044715f

__device__ __forceinline__ float gelu(float x) {
#if TANH
    if (x <= -10.0f) return -0.0f;  // the cube of x may overflow
    return 0.5f * x * (1.0f + tanhf(ROOT * (x + CUBIC * x * x * x)));
#else
    return x <= -40.0f ? -0.0f : 0.5f * x * erfcf(-0.7071067811865476f * x);
#endif
}

__device__ __forceinline__ float gelu_slope(float x) {
#if TANH
    if (x <= -10.0f) return 0.0f;
    if (x >= 10.0f) return 1.0f;
    float t = tanhf(ROOT * (x + CUBIC * x * x * x));
    float du = x * ROOT * (1.0f + 3.0f * CUBIC * x * x);
    return 0.5f * (1.0f + t) * (1.0f + (1.0f - t) * du);
#else
    float size = fminf(fabsf(x), 40.0f);
    float tail = 0.5f * erfcf(0.7071067811865476f * size);
    float v = size * 0.3989422804014327f * expf(-0.5f * size * size) - tail;
    return x != x ? x : x >= 0.0f ? 1.0f + v : -v;
#endif
}

extern "C" __global__ void gelu_fwd(T *y, const T *x, long long n) {
    long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * VEC;
    if (i + VEC <= n) {
        float a[VEC];
        load(a, x + i);
#pragma unroll
        for (int j = 0; j < VEC; j++) a[j] = gelu(a[j]);
        store(y + i, a);
    } else {
        for (; i < n; i++) y[i] = to<T>(gelu(to_float(x[i])));
    }
}

extern "C" __global__ void gelu_bwd(T *dx, const T *dy, const T *x, long long n) {
    long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * VEC;
    if (i + VEC <= n) {
        float a[VEC], g[VEC];
        load(a, x + i);
        load(g, dy + i);
#pragma unroll
        for (int j = 0; j < VEC; j++) a[j] = g[j] * gelu_slope(a[j]);
        store(dx + i, a);
    } else {
        for (; i < n; i++) dx[i] = to<T>(to_float(dy[i]) * gelu_slope(to_float(x[i])));
    }
}
