// gemm: c = alpha a b + bias;  gemm_acc: c = alpha a b + bias + beta c
// gemm_gelu: pre = alpha a b + bias, rounded, and c = GELU(pre)
// Shapes    c (.., M, N) OUT, a (.., M, K) T, b (.., K, N) T, each in any memory layout, up to three batch axes (B0,
//           B1, B2) with a stride of 0 where a broadcasts; bias (N,) T or null; pre, laid out as c, or null
// Launch    a block for a TILE_M x TILE_N tile of c: grid B0 B1 B2 ceil(M / TILE_M) ceil(N / TILE_N), along x; block
//           256, two on a multiprocessor; shared memory 2 TILE_K (TILE_M + TILE_N + 8) floats
// Memory    reads a ceil(N / TILE_N) times and b ceil(M / TILE_M) times, mostly from the L2 cache, writes c; 2 M N K
//           operations
// Numerics  fp32 products and sums in the order of k, rounded once at the end; no tensor cores, no atomics
// Requires  VEC_A > 1: a's stride is 1 along K (A_ALONG_K 1) or M (0), its address and other strides multiples of
//           VEC_A; the same of b along K (B_ALONG_K 1) or N (0); VEC_C > 1: so is c's along N. With 1 any stride will
//           do. TANH, as in gelu.cuh, is gemm_gelu's alone
// Source    register blocking as in Volkov and Demmel, Benchmarking GPUs to tune dense linear algebra (SC 2008); double
//           buffering and the threads' arrangement as CUTLASS describes them (doc/efficient_gemm.md)
// Measured  NVIDIA H200, 2026-11-29, commit 14d502b: float32 8192 x 8192 x 8192: 42.6 TFLOP/s, 83 % of cuBLAS in the
//           same run
#include "common.cuh"
#ifdef TANH
#include "gelu.cuh"
#endif

#define THREADS 256
#define PAD 4  // floats at the end of each row of shared memory: stores along K meet no bank twice

// Each thread makes EACH x EACH elements, in blocks of 4 x 4: 32 neighbours stand as 4 x 8, and 8 such groups as 4 x 2.
#define EACH (TILE_M / 16)
#define ROWS_APART 16
#define COLUMNS_APART 32

// Part of a tile on its way from global to shared memory: TILE elements along the outer axis (M or N), TILE_K along K.
// A thread takes COUNT vectors of it, STEP apart along the axis that a vector does not follow.
template <int TILE, int VEC, int ALONG_K>
struct Stage {
    static const int COUNT = TILE * TILE_K / (THREADS * VEC), FAST = (ALONG_K ? TILE_K : TILE) / VEC;
    static const int STEP = THREADS / FAST;
    Vector<T, VEC> part[COUNT];
    const T *at;  // its first vector
    int left;     // the elements from there to the end of the outer axis, or fewer than one

    __device__ __forceinline__ static int outer() { return ALONG_K ? threadIdx.x / FAST : threadIdx.x % FAST * VEC; }
    __device__ __forceinline__ static int inner() { return ALONG_K ? threadIdx.x % FAST * VEC : threadIdx.x / FAST; }

    __device__ __forceinline__ Stage(const T *from, long long ahead, long long along, int first, int size)
        : at(from + (first + outer()) * ahead + inner() * along), left(size - first - outer()) {}

    // Reads the next tile, which has `depth` elements along K left before the end of that axis.
    __device__ __forceinline__ void read(long long ahead, long long along, int depth) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const T *p = at + i * STEP * (ALONG_K ? ahead : along);
            int across = (ALONG_K ? left : depth - inner()) - i * STEP, n = ALONG_K ? depth - inner() : left;
            if (VEC > 1 && across > 0 && n >= VEC) {
                part[i] = *(const Vector<T, VEC> *)p;
            } else {
#pragma unroll
                for (int j = 0; j < VEC; j++)
                    part[i].of[j] = across > 0 && j < n ? p[j * (ALONG_K ? along : ahead)] : to<T>(0.0f);
            }
        }
        at += TILE_K * along;
    }

    __device__ __forceinline__ void write(float *tile) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            float *p = tile + (inner() + (ALONG_K ? 0 : i * STEP)) * (TILE + PAD) + outer() + (ALONG_K ? i * STEP : 0);
            float x[VEC];
#pragma unroll
            for (int j = 0; j < VEC; j++) x[j] = to_float(part[i].of[j]);
            if constexpr (ALONG_K || VEC == 1) {
#pragma unroll
                for (int j = 0; j < VEC; j++) p[j * (TILE + PAD)] = x[j];
            } else {
#pragma unroll
                for (int j = 0; j < VEC; j += 4) store(p + j, {x[j], x[j + 1], x[j + 2], x[j + 3]});
            }
        }
    }
};

enum Kind { WRITE, ADD, ACTIVATE };

// What becomes of N neighbours of c.
template <Kind KIND, int N>
__device__ __forceinline__ void finish(OUT *p, const float (&v)[N], float beta, OUT *pre) {
    float y[N];
#pragma unroll
    for (int j = 0; j < N; j++) y[j] = v[j];
    if constexpr (KIND == ADD) {
        float old[N];
        load(old, p);
#pragma unroll
        for (int j = 0; j < N; j++) y[j] += beta * old[j];
    }
#ifdef TANH
    if constexpr (KIND == ACTIVATE) {
        if (pre) store(pre, y);
#pragma unroll
        for (int j = 0; j < N; j++) y[j] = gelu(to_float(to<OUT>(y[j])));
    }
#endif
    store(p, y);
}

template <Kind KIND>
__device__ __forceinline__ void product(float *shared, Strided<OUT> c, Strided<const T> a, Strided<const T> b,
                                        const T *bias, int m, int n, int k, int batch1, int batch2, float alpha,
                                        float beta = 0.0f, OUT *pre = nullptr) {
    // Eight rows of tiles at a time, column by column: neighbours in time share tiles of a and of b in the L2 cache.
    const int tiles_m = (m + TILE_M - 1) / TILE_M, tiles_n = (n + TILE_N - 1) / TILE_N;
    int tile = blockIdx.x % (tiles_m * tiles_n), batch = blockIdx.x / (tiles_m * tiles_n);
    int group = tile / (8 * tiles_n), first = group * 8, rows = min(8, tiles_m - first);
    tile -= group * 8 * tiles_n;
    const int m0 = (first + tile % rows) * TILE_M, n0 = tile / rows * TILE_N;

    const int b2 = batch % batch2, b1 = batch / batch2 % batch1, b0 = batch / batch2 / batch1;
    const T *pa = a.data + b0 * a.strides[0] + b1 * a.strides[1] + b2 * a.strides[2];
    const T *pb = b.data + b0 * b.strides[0] + b1 * b.strides[1] + b2 * b.strides[2];
    OUT *pc = c.data + b0 * c.strides[0] + b1 * c.strides[1] + b2 * c.strides[2];

    const int within = threadIdx.x % 32, part = threadIdx.x / 32;
    const int row = part / 2 * (4 * EACH) + within / 8 * 4, column = part % 2 * (8 * EACH) + within % 8 * 4;

    float *tiles_a = shared, *tiles_b = shared + 2 * TILE_K * (TILE_M + PAD);
    Stage<TILE_M, VEC_A, A_ALONG_K> stage_a(pa, a.strides[3], a.strides[4], m0, m);
    Stage<TILE_N, VEC_B, B_ALONG_K> stage_b(pb, b.strides[4], b.strides[3], n0, n);
    float sum[EACH][EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) sum[i][j] = 0.0f;

    stage_a.read(a.strides[3], a.strides[4], k);
    stage_b.read(b.strides[4], b.strides[3], k);
    // Two buffers: while one is multiplied the next tile is on its way, and one barrier a tile is enough, since nobody
    // writes a buffer before all have passed the barrier after its last use.
    for (int depth = k, now = 0; depth > 0; depth -= TILE_K, now ^= 1) {
        float *tile_a = tiles_a + now * TILE_K * (TILE_M + PAD), *tile_b = tiles_b + now * TILE_K * (TILE_N + PAD);
        stage_a.write(tile_a);
        stage_b.write(tile_b);
        __syncthreads();
        if (depth > TILE_K) {
            stage_a.read(a.strides[3], a.strides[4], depth - TILE_K);
            stage_b.read(b.strides[4], b.strides[3], depth - TILE_K);
        }
#pragma unroll 2  // more would spill
        for (int y = 0; y < TILE_K; y++) {
            float left[EACH], right[EACH];
#pragma unroll
            for (int h = 0; h < EACH / 4; h++) {
                float u[4], v[4];
                load(u, tile_a + y * (TILE_M + PAD) + row + h * ROWS_APART);
                load(v, tile_b + y * (TILE_N + PAD) + column + h * COLUMNS_APART);
#pragma unroll
                for (int i = 0; i < 4; i++) left[4 * h + i] = u[i], right[4 * h + i] = v[i];
            }
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++) sum[i][j] += left[i] * right[j];
        }
    }

#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int x = m0 + row + i / 4 * ROWS_APART + i % 4;
#pragma unroll
        for (int h = 0; h < EACH / 4; h++) {
            int y = n0 + column + h * COLUMNS_APART;
            if (x >= m || y >= n) continue;
            OUT *p = pc + x * c.strides[3] + y * c.strides[4];
            float v[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                v[j] = alpha * sum[i][4 * h + j];
                if (bias && y + j < n) v[j] += to_float(bias[y + j]);
            }
            if (VEC_C == 4 && y + 4 <= n) {
                finish<KIND>(p, v, beta, pre ? pre + (p - c.data) : nullptr);
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (y + j >= n) break;
                    OUT *q = p + j * c.strides[4];
                    finish<KIND, 1>(q, {v[j]}, beta, pre ? pre + (q - c.data) : nullptr);
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) gemm(Strided<OUT> c, Strided<const T> a, Strided<const T> b,
                                                           const T *bias, int m, int n, int k, int batch1, int batch2,
                                                           float alpha) {
    __shared__ __align__(16) float tiles[2 * TILE_K * (TILE_M + TILE_N + 2 * PAD)];
    product<WRITE>(tiles, c, a, b, bias, m, n, k, batch1, batch2, alpha);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) gemm_acc(UPDATED Strided<OUT> c, Strided<const T> a,
                                                               Strided<const T> b, const T *bias, int m, int n, int k,
                                                               int batch1, int batch2, float alpha, float beta) {
    __shared__ __align__(16) float tiles[2 * TILE_K * (TILE_M + TILE_N + 2 * PAD)];
    product<ADD>(tiles, c, a, b, bias, m, n, k, batch1, batch2, alpha, beta);
}

#ifdef TANH
// One block a multiprocessor will do where its registers are more than two leave.
extern "C" __global__ void __launch_bounds__(THREADS) gemm_gelu(Strided<OUT> c, OUT *pre, Strided<const T> a,
                                                                Strided<const T> b, const T *bias, int m, int n, int k,
                                                                int batch1, int batch2, float alpha) {
    __shared__ __align__(16) float tiles[2 * TILE_K * (TILE_M + TILE_N + 2 * PAD)];
    product<ACTIVATE>(tiles, c, a, b, bias, m, n, k, batch1, batch2, alpha, 0.0f, pre);
}
#endif
