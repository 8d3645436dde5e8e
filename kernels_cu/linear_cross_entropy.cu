// linear_cross_entropy: the loss of each row of logits z, and its gradient dz in place of them
// linear_cross_entropy_x: y = x, but zeros in the rows that do not count, those with u = 0
// linear_cross_entropy_dx: dx = wide / largest, with largest = max(|wide|) of a row, 1 where that is 0
// linear_cross_entropy_db_acc: db += sum(dz)
// Shapes    z (R, L) fp32, its first V columns the logits, L = V rounded up to a multiple of 8; dz (R, V) T, at the
//           ends of the rows of z; loss, u, g (R,) fp32, t (R,) I; x, y, dx (R, C) T; wide (R, C), largest (R,) and
//           db (V,) fp32. g, the gradient of the losses times u, is null where no dz is wanted
// Launch    a row a block: grid R; block THREADS, for _x and _dx 256. _db_acc: 256 columns a block, grid ceil(V / 256);
//           block (64, 8)
// Memory    reads 8 R V bytes, the second half of them in part from the L2 cache, writes R V sizeof(T); 25 operations a
//           logit. The others read and write each array once; _dx reads wide twice, again from the cache
// Numerics  fp32, the exponentials relative to the largest logit so far (online); dz is rounded once. No atomics
// Requires  CAPPED is 1 with a softcap, else 0; rows of z begin at multiples of 16 bytes; V <= 2^31 - 2^14. VEC > 1: C
//           and the pointers of _x and _dx are multiples of it. A target outside [0, V) gives a loss of inf
// Source    the formulas of tinygrad_gpu/ops/cross_entropy.py; online as in arXiv:1805.02867, algorithm 3
// Measured  NVIDIA H200, 2026-11-29, commit 14d502b: float32 logits 1920 x 50304: 279 us, 49 % of the copy ceiling;
//           1024 x 128256: 318 us, 58 %
#include "common.cuh"

#ifdef THREADS  // of linear_cross_entropy alone, as VEC is of two others

#define VECTORS 4  // of four logits each: what a thread has of a tile
#define TILE (VECTORS * 4 * THREADS)

__device__ __forceinline__ int column(int tile, int k) { return tile + (k * THREADS + threadIdx.x) * 4; }

__device__ __forceinline__ void load_tile(float (&z)[VECTORS][4], const float *row, int tile, int V) {
#pragma unroll
    for (int k = 0; k < VECTORS; k++)
        if (column(tile, k) < V) load(z[k], row + column(tile, k));
}

__device__ __forceinline__ float capped(float z, float softcap, float inverse) {
    return CAPPED ? softcap * tanhf(z * inverse) : z;
}

// The first pass goes through a row tile by tile, the second back: its first tile is still in registers, and the next
// are what the L2 cache is likeliest to have. dz overwrites no logit that is still to be read: its element i begins at
// byte 4 L - sizeof(T) (L - i) of the row, logit i at 4 i, which is not behind that since i < L. So what a tile becomes
// lies in its own bytes or behind them, and those every thread has read by the barrier before it is written.
extern "C" __global__ void __launch_bounds__(THREADS)
    linear_cross_entropy(UPDATED float *z, float *loss, const I *t, const float *u, const float *g, int V, int L,
                         float e, float z_loss, float softcap) {
    __shared__ float scratch[3 * warps_of(THREADS)];
    float *row = z + (long long)blockIdx.x * L;
    const long long target = t[blockIdx.x];
    const float inverse = 1.0f / softcap;
    const float hit = target >= 0 && target < V ? capped(row[target], softcap, inverse) : -infinity();
    const float middle = fabsf(hit) < infinity() ? hit : 0.0f;  // sums of differences from it stay exact
    float now[VECTORS][4];

    float highest = -3.4028235e38f, sum = 0.0f, spread = 0.0f;  // finite: of two infinities the difference is NaN
    int tile = 0;
    for (;; tile += TILE) {
        load_tile(now, row, tile, V);
        float x[VECTORS][4], most = highest;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                bool inside = column(tile, k) + j < V;
                x[k][j] = inside ? capped(now[k][j], softcap, inverse) : -infinity();
                most = fmaxf(most, x[k][j]);
                spread += inside ? x[k][j] - middle : 0.0f;
            }
        }
        sum *= expf(highest - most);
        highest = most;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
#pragma unroll
            for (int j = 0; j < 4; j++) sum += expf(x[k][j] - highest);
        }
        if (V - tile <= TILE) break;
    }
    const float top = row_max<THREADS>(highest, scratch);
    float sums[2] = {sum * expf(highest - top), spread};
    row_sum<THREADS>(sums, scratch + warps_of(THREADS));
    const float total = sums[0], log = logf(total), even = e / V;
    if (threadIdx.x == 0) {
        float y = (1.0f - e) * (log + (top - hit));
        if (e != 0.0f) y += e * (log + (top - middle)) - even * sums[1];
        if (z_loss != 0.0f) y += z_loss * (top + log) * (top + log);
        loss[blockIdx.x] = u[blockIdx.x] == 0.0f ? 0.0f : u[blockIdx.x] * y;
    }
    if (g == nullptr) return;

    const float upstream = g[blockIdx.x];
    const float mass = upstream * (1.0f + (z_loss != 0.0f ? 2.0f * z_loss * (top + log) : 0.0f)) / total;
    T *dz = (T *)row + (sizeof(float) / sizeof(T) - 1) * L;
    for (;; tile -= TILE) {
        float next[VECTORS][4];
        if (tile) load_tile(next, row, tile - TILE, V);
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float x = capped(now[k][j], softcap, inverse), d = expf(x - top) * mass - upstream * even;
                if (column(tile, k) + j == target) d -= upstream * (1.0f - e);
                if (CAPPED) d *= 1.0f - x * inverse * (x * inverse);
                now[k][j] = upstream == 0.0f ? 0.0f : d;
            }
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if (column(tile, k) < V) store(dz + column(tile, k), now[k]);
#pragma unroll
            for (int j = 0; j < 4; j++) now[k][j] = next[k][j];
        }
        if (tile == 0) return;
    }
}

#endif
#ifdef VEC

extern "C" __global__ void __launch_bounds__(256) linear_cross_entropy_x(T *y, const T *x, const float *u, int C) {
    const bool counts = u[blockIdx.x] != 0.0f;
    const long long row = (long long)blockIdx.x * C;
    for_vectors<256, VEC, 0>(C, [&](int, int c) {
        Vector<T, VEC> values = {};
        if (counts) values = *(const Vector<T, VEC> *)(x + row + c);
        *(Vector<T, VEC> *)(y + row + c) = values;
    });
}

extern "C" __global__ void __launch_bounds__(256)
    linear_cross_entropy_dx(T *dx, float *largest, const float *wide, int C) {
    __shared__ float scratch[warps_of(256)];
    const long long row = (long long)blockIdx.x * C;
    float most = 0.0f;
    for_vectors<256, VEC, 0>(C, [&](int, int c) {
        float x[VEC];
        load(x, wide + row + c);
#pragma unroll
        for (int j = 0; j < VEC; j++) most = nan_max(most, fabsf(x[j]));
    });
    most = row_max<256>(most, scratch);
    if (most == 0.0f) most = 1.0f;
    if (threadIdx.x == 0) largest[blockIdx.x] = most;
    for_vectors<256, VEC, 0>(C, [&](int, int c) {
        float x[VEC];
        load(x, wide + row + c);
#pragma unroll
        for (int j = 0; j < VEC; j++) x[j] /= most;
        store(dx + row + c, x);
    });
}

#endif

// z is the array of linear_cross_entropy as T sees it. Four neighbours of a column in a vector may lie past V: they are
// read and left out.
extern "C" __global__ void __launch_bounds__(512)
    linear_cross_entropy_db_acc(UPDATED float *db, const T *z, int R, int V, int L) {
    __shared__ float sums[8][256];
    const int first = blockIdx.x * 256, mine = threadIdx.x * 4;
    const long long stride = (long long)(sizeof(float) / sizeof(T)) * L;
    float sum[4] = {};
    if (first + mine < V) {
        const T *dz = z + stride - L + first + mine;
#pragma unroll 4
        for (int r = threadIdx.y; r < R; r += 8) {
            float x[4];
            load(x, dz + r * stride);
#pragma unroll
            for (int j = 0; j < 4; j++) sum[j] += x[j];
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) sums[threadIdx.y][mine + j] = sum[j];
    __syncthreads();
    const int c = threadIdx.y * 64 + threadIdx.x;
    if (c >= 256 || first + c >= V) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) total += sums[i][c];
    db[first + c] += total;
}
