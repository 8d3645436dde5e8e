// layernorm_fwd: y = (s - mean) * rstd * w + b with s = x + residual, a row at a time
// layernorm_bwd: dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + ds with g = dy * w, xhat = (x - mean) * rstd; and
//                from the same reading of dy and x each block's share of dw = sum(dy * xhat) and db = sum(dy)
// layernorm_bwd_sum: dw and db from the shares
// Shapes    x, residual, s, y, dy, ds, dx (R, C) T; w, b (C,) T; mean, rstd (R,) fp32; dw, db (P, C) fp32 for P blocks;
//           shares (n, P, C), sums (n, C) fp32, n is 2 for dw and db, 1 for one of them. All but y, rstd, dy and x may
//           be null: with no residual there is no s
// Launch    forward: grid ceil(R / ROWS). Backward: the same where SUMS is 0; else grid P, no more than run at once,
//           BLOCKS a multiprocessor, and each takes every P-th group of ROWS rows. Both: block (THREADS, ROWS), THREADS
//           for a row. Sum: grid (ceil(C / 32), n), block (32, 16)
// Memory    forward reads x, writes y; backward reads dy and x, writes dx; residual, s and ds once each. 10 operations
//           an element forward, 20 backward. The shares: 4 n P C bytes written and read
// Numerics  fp32; s is rounded to T before it is used. The second pass over a row corrects the mean. No atomics: the
//           shares are added in one order
// Requires  a thread has ITEMS vectors of VEC elements of a row in registers, ITEMS * THREADS * VEC >= C; with ITEMS 0
//           any C, each pass reads the row again. VEC > 1: C and pointers that are multiples of it. CENTRED 0, for RMS
//           norm, leaves out mean(s) and mean(g); then mean is null. SUMS 1 if dw or db is wanted
// Source    arXiv:1607.06450, eqs. 3 and 4; arXiv:1910.07467, eq. 4
// Measured  NVIDIA H200, 2026-11-29, commit 14d502b: bfloat16, forward and backward, 32768 x 768: 32 us, 73 % of the
//           copy ceiling, 55 us, 65 %; 16384 x 4096: 85 us, 74 %, and 165 us, 57 %
#include "common.cuh"

// A launch compiles its own kernel alone, which its defines tell: SUMS is the backward's, ITEMS is both's.
#ifdef ITEMS

template <typename F>
__device__ __forceinline__ void each_vector(int C, F f) {
    for_vectors<THREADS, VEC, ITEMS>(C, f);
}

using Part = Row<T, THREADS, VEC, ITEMS>;

// x *= w in the columns from c on; null is all ones.
__device__ __forceinline__ void multiply(float (&x)[VEC], const T *w, int c) {
    if (!w) return;
    float e[VEC];
    load(e, w + c);
#pragma unroll
    for (int j = 0; j < VEC; j++) x[j] *= e[j];
}

#ifndef SUMS

// "At least 1 block" keeps the compiler from spilling registers to make room for more.
extern "C" __global__ void __launch_bounds__(THREADS * ROWS, 1) layernorm_fwd(
    T *y, T *s, float *mean, float *rstd, const T *x, const T *residual, const T *w, const T *b, long long R, int C,
    float eps) {
    __shared__ float scratch[3 * warps_of(THREADS * ROWS)];
    long long r = (long long)blockIdx.x * ROWS + threadIdx.y, at = r * C;
    int n = r < R ? C : 0;  // beyond the last row threads have no columns, but reach every barrier
    Part row;
    row.read(x + at, n);
    if (residual) {
        Part other;
        other.read(residual + at, n);
        each_vector(n, [&](int i, int c) {
            float a[VEC], e[VEC];
            row.get(a, i, c);
            other.get(e, i, c);
#pragma unroll
            for (int j = 0; j < VEC; j++) a[j] += e[j];
            store(s + at + c, a);
            if (ITEMS) store(row.kept[i].of, a);  // what is normalised is rounded, too
        });
        row.row = s + at;
    }

    float first = 0.0f;  // the mean, as far as one pass gives it
    if (CENTRED) {
        each_vector(n, [&](int i, int c) {
            float a[VEC];
            row.get(a, i, c);
#pragma unroll
            for (int j = 0; j < VEC; j++) first += a[j];
        });
        first = row_sum<THREADS>(first, scratch) / C;
    }
    float sums[2] = {0.0f, 0.0f};  // of the deviations from it, and of their squares
    each_vector(n, [&](int i, int c) {
        float a[VEC];
        row.get(a, i, c);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            float d = a[j] - first;
            sums[0] += d;
            sums[1] += d * d;
        }
    });
    row_sum<THREADS>(sums, scratch + warps_of(THREADS * ROWS));
    float error = CENTRED ? sums[0] / C : 0.0f;
    float scale = 1.0f / sqrtf(sums[1] / C - error * error + eps);
    if (threadIdx.x == 0 && r < R) {
        if (CENTRED) mean[r] = first + error;
        rstd[r] = scale;
    }
    each_vector(n, [&](int i, int c) {
        float a[VEC], e[VEC];
        row.get(a, i, c);
#pragma unroll
        for (int j = 0; j < VEC; j++) a[j] = (a[j] - first - error) * scale;
        multiply(a, w, c);
        if (b) {
            load(e, b + c);
#pragma unroll
            for (int j = 0; j < VEC; j++) a[j] += e[j];
        }
        store(y + at + c, a);
    });
}

#else

// A thread's part of its block's share of dw or db, in registers as its part of a row is, else in the share itself.
struct Sums {
    float *share;
    float kept[ITEMS ? ITEMS : 1][VEC];

    __device__ __forceinline__ void begin(float *shares, int C) {
        share = shares ? shares + (long long)blockIdx.x * C : nullptr;
        each_vector(C, [&](int i, int c) {
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                if (ITEMS) kept[i][j] = 0.0f;
                else if (share) share[c + j] = 0.0f;
            }
        });
    }

    __device__ __forceinline__ void add(float x, int i, int c, int j) {
        if (ITEMS) kept[i][j] += x;
        else if (share) share[c + j] += x;
    }

    // The ROWS threads of a column together, in order. scratch: THREADS * VEC elements a row of the block.
    __device__ __forceinline__ void end(float *scratch, int C) {
        if (!share) return;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int c = (i * THREADS + threadIdx.x) * VEC;
            float *mine = scratch + threadIdx.x * VEC;
            if (threadIdx.y > 0)
                for (int j = 0; j < VEC; j++) mine[(threadIdx.y - 1) * THREADS * VEC + j] = kept[i][j];
            if (ROWS > 1) __syncthreads();
            if (threadIdx.y == 0 && c < C) {
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    float sum = kept[i][j];
                    for (int y = 1; y < ROWS; y++) sum += mine[(y - 1) * THREADS * VEC + j];
                    share[c + j] = sum;
                }
            }
            if (ROWS > 1) __syncthreads();
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS * ROWS, BLOCKS) layernorm_bwd(
    T *dx, float *dw, float *db, const T *dy, const T *ds, const T *x, const T *w, const float *mean, const float *rstd,
    long long R, int C) {
    __shared__ float scratch[2][2 * warps_of(THREADS * ROWS)];
    __shared__ float columns[ROWS > 1 ? (ROWS - 1) * THREADS * VEC : 1];
    Sums dw_sums, db_sums;
    if (SUMS) {
        dw_sums.begin(dw, C);
        db_sums.begin(db, C);
    }
    int turn = 0;  // a row has the scratch that the one before has not: its other threads may still read that
    for (long long first = (long long)blockIdx.x * ROWS; first < R; first += (long long)gridDim.x * ROWS, turn ^= 1) {
        long long r = first + threadIdx.y, at = r * C;
        int n = r < R ? C : 0;
        Part x_row, dy_row, ds_row;
        x_row.read(x + at, n);
        dy_row.read(dy + at, n);
        if (ds) ds_row.read(ds + at, n);
        float middle = CENTRED && r < R ? mean[r] : 0.0f, scale = r < R ? rstd[r] : 0.0f;
        float sums[2] = {0.0f, 0.0f};  // of g and of g * xhat
        each_vector(n, [&](int i, int c) {
            float xhat[VEC], g[VEC];
            x_row.get(xhat, i, c);
            dy_row.get(g, i, c);
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                xhat[j] = (xhat[j] - middle) * scale;
                if (SUMS) dw_sums.add(g[j] * xhat[j], i, c, j);
                if (SUMS) db_sums.add(g[j], i, c, j);
            }
            multiply(g, w, c);
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                sums[0] += g[j];
                sums[1] += g[j] * xhat[j];
            }
        });
        if (!dx) continue;
        row_sum<THREADS>(sums, scratch[turn]);
        float mean_g = CENTRED ? sums[0] / C : 0.0f, mean_product = sums[1] / C;
        each_vector(n, [&](int i, int c) {
            float xhat[VEC], g[VEC], e[VEC];
            x_row.get(xhat, i, c);
            dy_row.get(g, i, c);
            multiply(g, w, c);
            if (ds) ds_row.get(e, i, c);
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                xhat[j] = (xhat[j] - middle) * scale;
                g[j] = (g[j] - mean_g - xhat[j] * mean_product) * scale;
                if (ds) g[j] += e[j];
            }
            store(dx + at + c, g);
        });
    }
    if (SUMS) {
        dw_sums.end(columns, C);
        db_sums.end(columns, C);
    }
}

#endif
#else

extern "C" __global__ void __launch_bounds__(512) layernorm_bwd_sum(float *sums, const float *shares, int P, int C) {
    __shared__ float part[16][32];
    int c = blockIdx.x * 32 + threadIdx.x;
    shares += (long long)blockIdx.y * P * C;
    float sum = 0.0f;
    if (c < C) {
#pragma unroll 8
        for (int p = threadIdx.y; p < P; p += 16) sum += shares[(long long)p * C + c];
    }
    part[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || c >= C) return;
#pragma unroll
    for (int i = 1; i < 16; i++) sum += part[i][threadIdx.x];
    sums[blockIdx.y * C + c] = sum;
}

#endif
