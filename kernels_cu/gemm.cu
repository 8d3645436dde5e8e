// gemm: c = EPILOGUE(alpha a b + bias), as gemm.cuh has it; gemm_sum, there: the tiles that were multiplied in pieces
// Shapes    c (.., M, N) OUT, a (.., M, K) T, b (.., K, N) T, each in any memory layout, up to three batch axes (B0,
//           B1, B2), `batches` in all, with a stride of 0 where a broadcasts; bias (N,) T or null; pre and other OUT,
//           laid out as c, or null; sums (M,) fp32 or null; parts fp32, slots, or null
// Launch    a block for a TILE_M x TILE_N tile of c or for a range of pieces; block 256, BLOCKS on a multiprocessor;
//           shared memory 2 TILE_K (TILE_M + TILE_N + 8) floats
// Memory    reads a ceil(N / TILE_N) times and b ceil(M / TILE_M) times, mostly from the L2 cache, writes c; 2 M N K
//           operations
// Numerics  fp32 products and sums in the order of k, rounded once at the end; no tensor cores, no atomics
// Requires  VEC_A > 1: a's stride is 1 along K (A_ALONG_K 1) or M (0), its address and other strides multiples of
//           VEC_A; the same of b along K (B_ALONG_K 1) or N (0); VEC_C > 1: so is c's along N. With 1 any stride will
//           do. TANH, as in gelu.cuh, with EPILOGUE GELU and SLOPE alone
// Source    register blocking as in Volkov and Demmel, Benchmarking GPUs to tune dense linear algebra (SC 2008); double
//           buffering and the threads' arrangement as CUTLASS describes them (doc/efficient_gemm.md)
// Measured  NVIDIA H200, 2026-11-30, commit 25e4eb2: float32 8192 x 8192 x 8192: 38.3 TFLOP/s, 75 % of cuBLAS in the
//           same run
#include "gemm.cuh"

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

// The products of a piece, and what becomes of them.
__device__ __forceinline__ void multiply(const Piece &piece, const Work &w, const Result &to, float *sums, float *parts,
                                         const Strided<const T> &a, const Strided<const T> &b, int k, float *shared,
                                         Later &later) {
    const Spot s = spot(w, piece.tile);
    if (threadIdx.x == 0) later = {s, piece.slot};
    const long long start = (long long)piece.first * TILE_K;
    const T *pa = a.data + offset_of(a.strides, s) + start * a.strides[4];
    const T *pb = b.data + offset_of(b.strides, s) + start * b.strides[3];

    const int within = threadIdx.x % 32, part = threadIdx.x / 32;
    const int row = part / 2 * (4 * EACH) + within / 8 * 4, column = part % 2 * (8 * EACH) + within % 8 * 4;

    float *tiles_a = shared, *tiles_b = shared + 2 * TILE_K * (TILE_M + PAD);
    Stage<TILE_M, VEC_A, A_ALONG_K> stage_a(pa, a.strides[3], a.strides[4], s.row, w.m);
    Stage<TILE_N, VEC_B, B_ALONG_K> stage_b(pb, b.strides[4], b.strides[3], s.column, w.n);
    float sum[EACH][EACH], row_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) sum[i][j] = 0.0f;

    int depth = min(piece.count * TILE_K, k - piece.first * TILE_K);
    stage_a.read(a.strides[3], a.strides[4], depth);
    stage_b.read(b.strides[4], b.strides[3], depth);
    // Two buffers: while one is multiplied the next tile is on its way, and one barrier a tile is enough, since nobody
    // writes a buffer before all have passed the barrier after its last use.
    for (int now = 0, step = 0; depth > 0; depth -= TILE_K, now ^= 1, step++) {
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
        if (threadIdx.x < TILE_M && w.sums_rows(piece, later.spot.column, step)) {
#pragma unroll
            for (int y = 0; y < TILE_K; y++) row_sum += tile_a[y * (TILE_M + PAD) + threadIdx.x];
        }
    }

    __syncthreads();  // with K = 0 nobody has waited yet
    const Spot here = later.spot;
    float *slot = later.slot < 0 ? nullptr : parts + later.slot * slot_size();
    const long long base = offset_of(to.c.strides, here);
#pragma unroll
    for (int h = 0; h < EACH / 4; h++) {
        const int y = column + h * COLUMNS_APART;
        float bias[4];
        bias_of(to.bias, to.n, here.column + y, bias);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int x = row + i / 4 * ROWS_APART + i % 4;
            float v[4];
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] = sum[i][4 * h + j];
            if (slot) store(slot + x * TILE_N + y, v);
            else to.put(base, here.row + x, here.column + y, v, bias);
        }
    }
    if (ROW_SUMS && threadIdx.x < TILE_M) {
        if (slot) slot[TILE_M * TILE_N + threadIdx.x] = row_sum;
        else if (here.column == 0 && here.row + threadIdx.x < w.m) sums[here.row + threadIdx.x] = row_sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gemm(SCRATCH Strided<OUT> c, SCRATCH Strided<OUT> pre, SCRATCH float *sums, SCRATCH float *parts,
         Strided<const T> a, Strided<const T> b, const T *bias, Strided<const OUT> other, int m, int n, int k,
         int batches, int batch1, int batch2, int slices, int whole, int per, float alpha, float beta) {
    __shared__ __align__(16) float tiles[2 * TILE_K * (TILE_M + TILE_N + 2 * PAD)];
    __shared__ Later later;
    const Work w(m, n, k, batches, batch1, batch2, slices, whole, per);
    const Result to{c, pre.data, other.data, bias, m, n, alpha, beta};
    w.for_pieces(blockIdx.x, [&](const Piece &piece) {
        multiply(piece, w, to, sums, parts, a, b, k, tiles, later);
        __syncthreads();  // before the next piece writes over the tiles
    });
}
