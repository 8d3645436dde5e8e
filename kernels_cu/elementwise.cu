// elementwise: y = f(a, b), f one of the formulas below, chosen by a define; b an array or a number
// Shapes    y, a (n,) T; b (period,) T, repeated along a, or null: then b is `number`, which some formulas do not use
// Launch    a thread for VEC elements: grid ceil(n / (VEC * blockDim)); block 256; no shared memory
// Memory    reads a and b, writes y: up to 3 n sizeof(T) bytes; 1 to 30 operations an element. y may be a or b
// Numerics  fp32, rounded once
// Requires  n a multiple of period; VEC > 1: pointers that are multiples of VEC * sizeof(T), a period that is n or a
//           multiple of VEC
// Source    the rules of tinygrad_gpu/ops/elementwise.py; for gradients a is dy, and b what the rule saved
// Measured  NVIDIA H200, 2026-11-29, commit 14d502b: bfloat16 32768 x 3072, addition: 143 us, 99 % of the copy ceiling
#include "common.cuh"

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float f(float a, float b) {
#if defined(OP_ADD)
    return a + b;
#elif defined(OP_SUB)
    return a - b;
#elif defined(OP_MUL)
    return a * b;
#elif defined(OP_RELU)
    return a > 0.0f || a != a ? a : 0.0f;
#elif defined(OP_RELU_BWD)
    return b > 0.0f ? a : 0.0f;
#elif defined(OP_TANH)
    return tanhf(a);
#elif defined(OP_TANH_BWD)
    return a * (1.0f - b * b);
#elif defined(OP_SIGMOID)
    return sigmoid(a);
#elif defined(OP_SIGMOID_BWD)
    return a * (b * (1.0f - b));
#elif defined(OP_SILU)
    return a * sigmoid(a);
#elif defined(OP_SILU_BWD)
    float s = sigmoid(b);
    return a * (s * (1.0f + b * (1.0f - s)));
#endif
}

extern "C" __global__ void __launch_bounds__(256)
    elementwise(T *y, const T *a, const T *b, long long n, long long period, float number) {
    long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * VEC;
    if (i + VEC <= n) {
        // Division takes 64-bit numbers five times as long.
        long long j = period == n ? i : n >> 32 ? i % period : (unsigned)i % (unsigned)period;
        float p[VEC], q[VEC];
        load(p, a + i);
        if (b) {
            load(q, b + j);
        } else {
#pragma unroll
            for (int k = 0; k < VEC; k++) q[k] = number;
        }
#pragma unroll
        for (int k = 0; k < VEC; k++) p[k] = f(p[k], q[k]);
        store(y + i, p);
    } else {  // where the period is n
        for (; i < n; i++) y[i] = to<T>(f(to_float(a[i]), b ? to_float(b[i]) : number));
    }
}
