// gelu_fwd: y = GELU(x);  gelu_bwd: dx = dy GELU'(x)
// Shapes    x, y, dx, dy (n,) T
// Launch    a thread for VEC elements: grid ceil(n / (VEC * blockDim)); block 256; no shared memory
// Memory    forward reads x, writes y; backward reads dy and x, writes dx; about 30 operations an element
// Numerics  fp32, with the GPU's own exp and division. Neither form subtracts nearly equal numbers, so that small
//           results are right too
// Requires  VEC > 1: pointers that are multiples of VEC * sizeof(T); TANH is 1 for the tanh form, else 0
// Source    arXiv:1606.08415; the exact form as in tinygrad_gpu/ops/gelu.py, by ERFC 5666 of Hart et al., Computer
//           Approximations (1968)
// Measured  NVIDIA H200, 2026-11-29, commit 14d502b: bfloat16 32768 x 3072: tanh form 99 us, 95 % of the copy ceiling,
//           backward 144 us, 98 %; exact form 135 us, 70 %, and 154 us, 92 %
#include "gelu.cuh"

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
