// softmax_fwd: y = exp(z - max(z)) / sum(exp(z - max(z))) of a row z = scale * x, or with LOG its logarithm
// softmax_bwd: dx = y * (dy - sum(dy * y)), or with LOG dx = dy - exp(y) * sum(dy)
// softmax_bwd_lse: p = exp(z - lse) again from z = scale * s, and ds = p * (dp - sum(p * dp)) * scale
// Shapes    y, dx, dy, p, ds (R, C) T; x, s, dp (R, C) S, for softmax_bwd T; lse (R,) fp32. lse is null for a plain
//           softmax; of p and ds one may be null
// Launch    grid ceil(R / ROWS), block (THREADS, ROWS), THREADS for a row
// Memory    each array once; of x, s and dp only what is seen. 15 operations an element forward, 5 and 20 backward
// Numerics  fp32. A row of nothing but -inf gives NaN; where lse is wanted zeros and inf, as one that sees no key
// Requires  a thread has ITEMS vectors of VEC elements of a row in registers, ITEMS * THREADS * VEC >= C; with ITEMS 0
//           any C, and the row is read twice. VEC > 1: C and pointers that are multiples of it. y may be x, p may be s
//           and ds may be dp if S is T. Row r is query i = r % queries and sees the keys (columns) j with
//           i + offset - window < j <= i + offset: all for queries = 1, offset = C, window = 2^31 - 1. Others count as
//           -inf, whatever is there
// Source    arXiv:1805.02867, algorithm 3, for rows that registers do not hold; arXiv:2307.08691, algorithm 2, for lse
// Measured  NVIDIA H200, 2026-11-29, commit 14d502b: bfloat16 16384 x 4096: forward 104 us, 61 % of the copy ceiling,
//           backward 99 us, 95 %
#include "common.cuh"

using Part = Row<S, THREADS, VEC, ITEMS>;

template <typename F>
__device__ __forceinline__ void each_vector(int C, F f) {
    for_vectors<THREADS, VEC, ITEMS>(C, f);
}

// The keys that a row sees: begin to end - 1.
struct Keys {
    int begin, end;

    __device__ __forceinline__ Keys(long long r, long long R, int C, int queries, int offset, int window) {
        long long last = r % queries + offset, first = last - window + 1;
        begin = first < 0 ? 0 : first < C ? (int)first : C;
        end = r >= R || last < 0 ? 0 : last < C ? (int)last + 1 : C;
    }

    __device__ __forceinline__ bool sees(int c) const { return c >= begin && c < end; }

    // z of the vector at column c, -inf at keys that are not seen.
    __device__ __forceinline__ void scores(float (&z)[VEC], const Part &x, int i, int c, float scale) const {
        bool all = c >= begin && c + VEC <= end, any = c < end && c + VEC > begin;
        if (any) x.get(z, i, c);
#pragma unroll
        for (int j = 0; j < VEC; j++) z[j] = all || (any && sees(c + j)) ? z[j] * scale : -infinity();
    }
};

// What is taken off z before exp: the maximum, but no infinity off another.
__device__ __forceinline__ float shift_of(float top) { return top == -infinity() ? 0.0f : top; }

// "At least 1 block" keeps the compiler from spilling registers to make room for more.
extern "C" __global__ void __launch_bounds__(THREADS * ROWS, 1) softmax_fwd(
    T *y, float *lse, const S *x, long long R, int C, int queries, int offset, int window, float scale) {
    __shared__ float scratch[2 * warps_of(THREADS * ROWS)];
    long long r = (long long)blockIdx.x * ROWS + threadIdx.y, at = r * C;
    int n = r < R ? C : 0;  // beyond the last row threads have no columns, but reach every barrier
    Keys keys(r, R, C, queries, offset, window);
    Part row;
    row.read(x + at, keys.end, keys.begin);
    float kept[ITEMS ? ITEMS : 1][VEC], top = -infinity(), sum = 0.0f, shift;
    if (ITEMS) {
        each_vector(n, [&](int i, int c) {
            keys.scores(kept[i], row, i, c, scale);
#pragma unroll
            for (int j = 0; j < VEC; j++) top = fmaxf(top, kept[i][j]);
        });
        shift = shift_of(row_max<THREADS>(top, scratch));
        each_vector(n, [&](int i, int c) {
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                float e = expf(kept[i][j] - shift);
                sum += e;
                if (!LOG) kept[i][j] = e;
            }
        });
    } else {
        each_vector(n, [&](int i, int c) {
            float z[VEC], before = top;
            keys.scores(z, row, i, c, scale);
#pragma unroll
            for (int j = 0; j < VEC; j++) top = fmaxf(top, z[j]);
            sum *= expf(before - shift_of(top));
#pragma unroll
            for (int j = 0; j < VEC; j++) sum += expf(z[j] - shift_of(top));
        });
        shift = shift_of(row_max<THREADS>(top, scratch));
        sum *= expf(top - shift);
    }
    sum = row_sum<THREADS>(sum, scratch + warps_of(THREADS * ROWS));
    float log_sum = logf(sum), inverse = lse && sum == 0.0f ? 0.0f : 1.0f / sum;
    if (lse && threadIdx.x == 0 && r < R) lse[r] = sum == 0.0f ? infinity() : shift + log_sum;
    each_vector(n, [&](int i, int c) {
        float z[VEC];
        if (!ITEMS) keys.scores(z, row, i, c, scale);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            if (ITEMS) z[j] = kept[i][j];
            if (LOG) z[j] = z[j] - shift - log_sum;
            else z[j] = (ITEMS ? z[j] : expf(z[j] - shift)) * inverse;
        }
        store(y + at + c, z);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS * ROWS, 1) softmax_bwd(
    T *dx, const T *dy, const T *y, long long R, int C) {
    __shared__ float scratch[warps_of(THREADS * ROWS)];
    long long r = (long long)blockIdx.x * ROWS + threadIdx.y, at = r * C;
    int n = r < R ? C : 0;
    Row<T, THREADS, VEC, ITEMS> dy_row, y_row;
    dy_row.read(dy + at, n);
    y_row.read(y + at, n);
    float sum = 0.0f;
    each_vector(n, [&](int i, int c) {
        float g[VEC], p[VEC];
        dy_row.get(g, i, c);
        if (!LOG) y_row.get(p, i, c);
#pragma unroll
        for (int j = 0; j < VEC; j++) sum += LOG ? g[j] : g[j] * p[j];
    });
    sum = row_sum<THREADS>(sum, scratch);
    each_vector(n, [&](int i, int c) {
        float g[VEC], p[VEC];
        dy_row.get(g, i, c);
        y_row.get(p, i, c);
#pragma unroll
        for (int j = 0; j < VEC; j++) g[j] = LOG ? g[j] - expf(p[j]) * sum : p[j] * (g[j] - sum);
        store(dx + at + c, g);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS * ROWS, 1) softmax_bwd_lse(
    T *p, T *ds, const S *s, const float *lse, const S *dp, long long R, int C, int queries, int offset, int window,
    float scale) {
    __shared__ float scratch[warps_of(THREADS * ROWS)];
    long long r = (long long)blockIdx.x * ROWS + threadIdx.y, at = r * C;
    int n = r < R ? C : 0;
    Keys keys(r, R, C, queries, offset, window);
    Part s_row, dp_row;
    s_row.read(s + at, keys.end, keys.begin);
    if (ds) dp_row.read(dp + at, keys.end, keys.begin);
    float log_sum = r < R ? lse[r] : 0.0f, kept[ITEMS ? ITEMS : 1][VEC], sum = 0.0f;
    // p of a vector, and dp, 0 at keys that are not seen.
    auto values = [&](float (&z)[VEC], float (&g)[VEC], int i, int c, bool anew) {
        if (anew) keys.scores(z, s_row, i, c, scale);
        if (ds && c < keys.end && c + VEC > keys.begin) dp_row.get(g, i, c);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            z[j] = anew ? expf(z[j] - log_sum) : kept[ITEMS ? i : 0][j];
            g[j] = ds && keys.sees(c + j) ? g[j] : 0.0f;
        }
    };
    if (ds) {
        each_vector(n, [&](int i, int c) {
            float z[VEC], g[VEC];
            values(z, g, i, c, true);
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                sum += z[j] * g[j];
                if (ITEMS) kept[i][j] = z[j];
            }
        });
        sum = row_sum<THREADS>(sum, scratch);
    }
    each_vector(n, [&](int i, int c) {
        float z[VEC], g[VEC];
        values(z, g, i, c, !ITEMS || !ds);
        if (p) store(p + at + c, z);
        if (!ds) return;
#pragma unroll
        for (int j = 0; j < VEC; j++) g[j] = keys.sees(c + j) ? z[j] * (g[j] - sum) * scale : 0.0f;
        store(ds + at + c, g);
    });
}
