// dropout: y = x scale where the element's random word is at least the threshold, else 0; with dy for x it gives dx
// Shapes    x, y (R, C) T; y may be x
// Launch    a thread for N = max(VEC, 4) elements of a row: grid ceil(R ceil(C / N) / blockDim); block 256; no shared
//           memory
// Memory    reads x, writes y: 2 R C sizeof(T) bytes, no mask; about 15 operations an element
// Numerics  fp32, rounded once; a dropped element gives 0 even where it is infinite or NaN
// Requires  VEC > 1: R = 1 and pointers that are multiples of VEC * sizeof(T). Row r starts with the Philox counter
//           `counter` + r ceil(C / 4); threshold is p 2^32, scale 1 / (1 - p)
// Source    Srivastava et al., Dropout (JMLR 15, 2014); philox.cuh
// Measured  NVIDIA H200, 2026-11-29, commit 14d502b: 32768 x 3072: bfloat16 138 us, 68 % of the copy ceiling, float32
//           200 us, 94 %
#include "philox.cuh"

extern "C" __global__ void __launch_bounds__(256)
    dropout(T *y, const T *x, long long R, long long C, unsigned long long counter, unsigned long long draw,
            unsigned long long seed, unsigned long long threshold, float scale) {
    const int N = VEC > 4 ? VEC : 4;
    long long quarters = (C + 3) / 4;  // counters of a row: each serves four elements
    long long quarter = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * (N / 4);
    if (quarter >= R * quarters) return;
    long long row = R == 1 ? 0 : quarter / quarters;
    long long i = 4 * quarter - row * (4 * quarters - C), end = (row + 1) * C;

    Vector<unsigned, 4> words[N / 4];
#pragma unroll
    for (int j = 0; j < N / 4; j++) words[j] = philox(counter + quarter + j, draw, seed);
    if (VEC > 1 && i + N <= end) {
        float a[N];
        load(a, x + i);
#pragma unroll
        for (int j = 0; j < N; j++) a[j] = words[j / 4].of[j % 4] >= threshold ? a[j] * scale : 0.0f;
        store(y + i, a);
    } else {
#pragma unroll
        for (int j = 0; j < N; j++)
            if (i + j < end) y[i + j] = to<T>(words[j / 4].of[j % 4] >= threshold ? to_float(x[i + j]) * scale : 0.0f);
    }
}
