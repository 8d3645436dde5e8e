// GELU and its slope of one number, in fp32: the tanh form if TANH is 1, else the exact one. With the GPU's own exp and
// division; neither form subtracts nearly equal numbers, so that small results are right too.
// Source: arXiv:1606.08415; the exact form as in tinygrad_gpu/ops/gelu.py, by ERFC 5666 of Hart et al., Computer
// Approximations (1968).
#pragma once
#include "common.cuh"

#if TANH
// 1 + tanh(u) = 2 sigmoid(2 u) = 2 / (1 + e), e = exp(-2 u), 2 u = LINEAR x + CUBIC x^3.
#define LINEAR 1.5957691216057308f  // 2 sqrt(2 / pi)
#define CUBIC (LINEAR * 0.044715f)
#define LOG2_E 1.4426950408889634f

__device__ __forceinline__ float power(float x) {
    return exp2f(-x * (LOG2_E * LINEAR + LOG2_E * CUBIC * (x * x)));
}

// Far out they are 0, x or 1 to fp32, without infinities. NaN stays.
__device__ __forceinline__ float gelu(float x) {
    x = x < -12.0f ? -12.0f : x;
    return __fdividef(x, 1.0f + power(x));
}

__device__ __forceinline__ float gelu_slope(float x) {
    x = x > 10.0f ? 10.0f : x;
    const float e = power(x), s = __fdividef(1.0f, 1.0f + e);  // s e = 1 - s, without its rounding where s is near 1
    const float slope = s + s * (s * e) * (x * (LINEAR + 3.0f * CUBIC * (x * x)));
    return x < -10.0f ? 0.0f : slope;
}
#else
// Q(a) / exp(-a^2 / 2) for a >= 0, Q the upper tail of the normal distribution: Hart's rational function.
__device__ __forceinline__ float tail(float a) {
    float top = 3.52624966e-2f, bottom = 8.83883476e-2f;
    top = top * a + 0.700383064f, bottom = bottom * a + 1.75566716f;
    top = top * a + 6.37396220f, bottom = bottom * a + 16.0641776f;
    top = top * a + 33.9128661f, bottom = bottom * a + 86.7807322f;
    top = top * a + 112.079291f, bottom = bottom * a + 296.564249f;
    top = top * a + 221.213596f, bottom = bottom * a + 637.333633f;
    top = top * a + 220.206868f, bottom = bottom * a + 793.826513f;
    return __fdividef(top, bottom * a + 440.413736f);
}

__device__ __forceinline__ float gelu(float x) {
    float a = fminf(fabsf(x), 40.0f);
    return x != x ? x : fmaxf(x, 0.0f) - a * __expf(-0.5f * a * a) * tail(a);
}

__device__ __forceinline__ float gelu_slope(float x) {
    float a = fminf(fabsf(x), 40.0f);
    float v = __expf(-0.5f * a * a) * (a * 0.3989422804f - tail(a));
    return x != x ? x : x >= 0.0f ? 1.0f + v : -v;
}
#endif
