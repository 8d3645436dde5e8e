// adamw_square_sum: the sum of squares of an array, a number a block
// adamw_square_sum_total: these numbers, of all arrays, added
// adamw_begin: what a step needs to know, from the norm and the options
// adamw: the step
// Shapes    g, w, m, v (n,) fp32, g of adamw_square_sum (n,) T, copy (n,) T or null; partial (p,), total (1,) fp64;
//           steps (k,), the counts of the k parameters in w, all equal; options (7,) fp64, plan (10,) fp32: see below
// Launch    adamw_square_sum: grid ceil(n / TILE) but no more than a limit; adamw_square_sum_total: grid 1; both blocks
//           of THREADS. adamw_begin: grid 1, block 64. adamw: a thread for VEC elements, grid
//           ceil(n / (VEC * blockDim)), block 256
// Memory    adamw_square_sum reads g; adamw reads w, m, v and g, writes w, m, v and copy: 28 bytes an element, 30 with
//           a copy
// Numerics  squares and their sum in fp64, in an order that the sizes fix; norm, clipping, 1 - b^t in fp64; else fp32.
//           A norm that is not finite changes none of w, m, v, copy and steps
// Requires  VEC > 1: pointers that are multiples of VEC elements
// Source    arXiv:1711.05101, algorithm 2; the formulas of tinygrad_gpu/ops/adamw.py
// Measured  NVIDIA H200, 2026-11-29, commit 14d502b: 124 million parameters, with the norm: 0.95 ms, 99 % of the copy
//           ceiling
#include "common.cuh"

// Elements that a thread of adamw_square_sum has on their way from memory at once, and those of its block.
#define EACH 16
#define TILE (EACH * THREADS)

extern "C" __global__ void __launch_bounds__(THREADS) adamw_square_sum(double *partial, const T *g, long long n) {
    __shared__ double scratch[warps_of(THREADS)];
    double sum = 0.0;
    for (long long start = (long long)blockIdx.x * TILE; start < n; start += (long long)gridDim.x * TILE) {
        if (start + TILE <= n) {
            float x[EACH / VEC][VEC];
#pragma unroll
            for (int i = 0; i < EACH / VEC; i++) load(x[i], g + start + (i * THREADS + threadIdx.x) * VEC);
#pragma unroll
            for (int i = 0; i < EACH; i++) sum += (double)x[i / VEC][i % VEC] * x[i / VEC][i % VEC];
        } else {
            for (long long i = start + threadIdx.x; i < n; i += THREADS) sum += (double)to_float(g[i]) * to_float(g[i]);
        }
    }
    sum = row_sum<THREADS>(sum, scratch);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    adamw_square_sum_total(double *total, const double *partial, int p) {
    __shared__ double scratch[warps_of(THREADS)];
    double sum = 0.0;
    for (int i = threadIdx.x; i < p; i += THREADS) sum += partial[i];
    sum = row_sum<THREADS>(sum, scratch);
    if (threadIdx.x == 0) total[0] = sum;
}

enum Option { GRAD_SCALE, MAX_NORM, LR, BETA1, BETA2, EPS, DECAY };
enum Plan { TAKEN, FACTOR, M_OLD, M_NEW, V_OLD, V_NEW, STEP, ROOT, FLOOR, SHRINK };

extern "C" __global__ void adamw_begin(float *plan, UPDATED int *steps, const double *options, const double *total,
                                       int k) {
    double norm = sqrt(total[0]) / options[GRAD_SCALE];
    int taken = norm <= 1.7976931348623157e308;  // neither infinite nor NaN
    for (int i = threadIdx.x; i < k; i += blockDim.x) steps[i] += taken;
    if (threadIdx.x > 0) return;
    double t = steps[0], b1 = options[BETA1], b2 = options[BETA2];
    double clip = options[MAX_NORM] / (norm + 1e-6);
    plan[TAKEN] = (float)taken;
    plan[FACTOR] = (float)((clip < 1.0 ? clip : 1.0) / options[GRAD_SCALE]);
    plan[M_OLD] = (float)b1;
    plan[M_NEW] = (float)(1.0 - b1);
    plan[V_OLD] = (float)b2;
    plan[V_NEW] = (float)(1.0 - b2);
    plan[STEP] = (float)(options[LR] / (1.0 - pow(b1, t)));
    plan[ROOT] = (float)(1.0 / sqrt(1.0 - pow(b2, t)));
    plan[FLOOR] = (float)options[EPS];
    plan[SHRINK] = (float)(options[LR] * options[DECAY]);
}

// The step for the N elements from the i-th on.
template <int N>
__device__ __forceinline__ void update(float *w, float *m, float *v, T *copy, const float *g, const float *plan,
                                       long long i) {
    float a[N], b[N], c[N], d[N];
    load(a, w + i);
    load(b, m + i);
    load(c, v + i);
    load(d, g + i);
#pragma unroll
    for (int j = 0; j < N; j++) {
        float x = d[j] * plan[FACTOR];
        b[j] = plan[M_OLD] * b[j] + plan[M_NEW] * x;
        c[j] = plan[V_OLD] * c[j] + plan[V_NEW] * (x * x);
        float change = plan[STEP] * (b[j] / (sqrtf(c[j]) * plan[ROOT] + plan[FLOOR]));
        if (plan[SHRINK] != 0.0f) change += plan[SHRINK] * a[j];
        a[j] -= change;
    }
    store(w + i, a);
    store(m + i, b);
    store(v + i, c);
    if (copy) store(copy + i, a);
}

extern "C" __global__ void __launch_bounds__(256) adamw(UPDATED float *w, UPDATED float *m, UPDATED float *v,
                                                        UPDATED T *copy, const float *g, const float *plan,
                                                        long long n) {
    if (plan[TAKEN] == 0.0f) return;
    long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * VEC;
    if (i + VEC <= n) update<VEC>(w, m, v, copy, g, plan, i);
    else
        for (; i < n; i++) update<1>(w, m, v, copy, g, plan, i);
}
