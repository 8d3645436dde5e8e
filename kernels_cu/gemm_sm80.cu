// gemm_sm80: c = EPILOGUE(alpha a b + bias), as gemm.cuh has it, on the matrix cores of NVIDIA's sm_80 and newer;
//            gemm_sum, there: the tiles that were multiplied in pieces
// Shapes    c (.., M, N) OUT, a (.., M, K) T, b (.., K, N) T, each in any memory layout, up to three batch axes (B0,
//           B1, B2), `batches` in all, with a stride of 0 where a broadcasts; bias (N,) T or null; pre and other OUT,
//           laid out as c, or null; sums (M,) fp32 or null; parts fp32, slots, or null
// Launch    a block for a TILE_M x TILE_N tile of c or for a range of pieces; block 32 WARPS_M WARPS_N, each warp for a
//           part of the tile; dynamic shared memory STAGES TILE_K (TILE_M + TILE_N) sizeof(T) bytes
// Memory    reads a ceil(N / TILE_N) times and b ceil(M / TILE_M) times, mostly from the L2 cache, writes c; 2 M N K
//           operations
// Numerics  products of T, for float of tf32, to which a and b are rounded (11 bits), also in the row sums; sums in
//           fp32, rounded once at the end; no atomics
// Requires  VEC_A > 1, 16 bytes of elements: a's stride is 1 along K (A_ALONG_K 1) or M (0), its address and other
//           strides multiples of VEC_A; the same of b along K (B_ALONG_K 1) or N (0); VEC_C > 1: so is c's along N.
//           With 1 any stride will do. All sizes are powers of two; a warp's part has 16 to 128 rows and at least 32
//           columns; TILE_K is 64 bytes or more, and a tile of each operand at least 16 bytes a thread. STAGES >= 2.
//           TANH, as in gelu.cuh, with EPILOGUE GELU and SLOPE alone. Element by element NVRTC 13.0 spills up to 24
//           bytes
// Source    the PTX ISA (see mma.cuh); copies in several stages and fragments in two buffers as CUTLASS describes them
//           (doc/efficient_gemm.md)
#include "gemm.cuh"
#include "mma.cuh"

#define THREADS (32 * WARPS_M * WARPS_N)
#define PART_M (TILE_M / WARPS_M)  // what a warp makes of a tile
#define PART_N (TILE_N / WARPS_N)
#define CHUNK (16 / (int)sizeof(T))   // the elements of 16 bytes
#define STEPS (TILE_K / (2 * CHUNK))  // a fragment has two chunks along K

// Tiles of an operand, of TILE elements along the outer axis (M or N) and TILE_K along K, and of them the fragments for
// a warp's PART of the outer axis. A tile in shared memory has the rows that it has in global memory: along K if
// ALONG_K, else along the outer axis.
template <int TILE, int PART, int VEC, int ALONG_K, bool IS_B>
struct Operand {
    static const int CHUNKS = (ALONG_K ? TILE_K : TILE) / CHUNK, PITCH = CHUNKS * 16;  // of a row; bytes of it
    static const int COUNT = TILE * TILE_K / (THREADS * CHUNK), STEP = THREADS / CHUNKS;
    static const int FRAGMENTS = PART / 16;
    // Matrices of 32-bit elements cannot be transposed as they are loaded: their words come one by one.
    static const bool BY_WORDS = !ALONG_K && CHUNK == 4;
    // Fragments come by sixteen along the outer axis, one of a or two of b. Of their four words the second is a's of
    // the second eight along the outer axis, but b's along K, since each of b's two wants its words in neighbouring
    // registers.
    static const int OUTER = IS_B ? 16 : 8, INNER = IS_B ? 8 : 16;
    const T *at;              // this thread's first chunk of the next tile; of the others each lies STEP rows further
    long long ahead, beside;  // strides from row to row, and in a row
    int left;                 // the elements from there to the end of the outer axis, or fewer than one
    int mine;                 // the byte of a tile where this lane reads for the first fragment

    // The byte of a tile where a chunk begins: chunks change places within a row, so that the chunks of one number of
    // eight rows, or two neighbours of each of four rows, meet every bank once.
    __device__ __forceinline__ static int place(unsigned row, unsigned chunk) {
        const unsigned turn = CHUNKS < 8 ? row * CHUNKS / 8 % CHUNKS : BY_WORDS ? row % 4 * 2 : row % 8;
        return row * PITCH + (chunk ^ turn) * 16;
    }

    __device__ __forceinline__ Operand(const T *from, long long outer, long long inner, int first, int size, int part)
        : ahead(ALONG_K ? outer : inner), beside(VEC > 1 ? 1 : ALONG_K ? inner : outer) {
        const int row = threadIdx.x / CHUNKS, column = threadIdx.x % CHUNKS * CHUNK, begin = part * PART;
        at = from + first * outer + row * ahead + column * beside;
        left = size - first - (ALONG_K ? row : column);
        const int eight = threadIdx.x % 8, outer_half = threadIdx.x / OUTER % 2, inner_half = threadIdx.x / INNER % 2;
        if (ALONG_K) mine = place(begin + outer_half * 8 + eight, inner_half);
        else if (!BY_WORDS) mine = place(inner_half * 8 + eight, begin / CHUNK + outer_half);
        else mine = place(in_quad(), (begin + quad()) / CHUNK) + quad() % CHUNK * 4;
    }

    // Begins to copy the next tile, which has `depth` elements along K left before the end of that axis, with zeros for
    // those beyond it or the outer axis.
    __device__ __forceinline__ void fetch(Copies &copies, char *tile, int depth) {
#pragma unroll(VEC > 1 ? COUNT : 1)  // element by element all at once would spill
        for (int i = 0; i < COUNT; i++) {
            const int row = threadIdx.x / CHUNKS + i * STEP, column = threadIdx.x % CHUNKS * CHUNK;
            const int rows = ALONG_K ? left - i * STEP : depth - row, along = ALONG_K ? depth - column : left;
            const int n = rows > 0 ? max(0, min(along, CHUNK)) : 0;
            char *there = tile + place(row, column / CHUNK);
            if (VEC > 1) {
                copies.add(there, at, n * (int)sizeof(T));
            } else {
                Vector<T, CHUNK> chunk;
#pragma unroll
                for (int j = 0; j < CHUNK; j++) chunk.of[j] = j < n ? at[j * beside] : to<T>(0.0f);
                *(Vector<T, CHUNK> *)there = chunk;
            }
            at += STEP * ahead;
        }
        if (ALONG_K) at += TILE_K * beside - TILE * ahead;
    }

    // The warp's fragments at a step along K of a tile.
    __device__ __forceinline__ void get(unsigned (&x)[FRAGMENTS][4], const char *tile, int step) const {
#pragma unroll
        for (int i = 0; i < FRAGMENTS; i++) {
            if (ALONG_K) {
                load_matrices<false>(x[i], tile + (mine ^ step * 32) + i * 16 * PITCH);
            } else if (!BY_WORDS) {
                load_matrices<true>(x[i], tile + (mine ^ i * 32) + step * 16 * PITCH);
            } else {
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    const int outer_half = r * 8 / OUTER % 2, inner_half = r * 8 / INNER % 2;
                    x[i][r] = *(const unsigned *)(tile + (mine ^ (i % 2 * 64 + outer_half * 32)) + i / 2 * 128 +
                                                  (step * 8 + inner_half * 4) * PITCH);
                }
            }
        }
    }
};

// The products of a piece, and what becomes of them.
__device__ __forceinline__ void multiply(const Piece &piece, const Work &w, const Result &to, float *sums, float *parts,
                                         const Strided<const T> &a, const Strided<const T> &b, int k, char *shared,
                                         Later &later, Copies &copies) {
    const Spot s = spot(w, piece.tile);
    if (threadIdx.x == 0) later = {s, piece.slot};
    const long long start = (long long)piece.first * TILE_K;
    const T *pa = a.data + offset_of(a.strides, s) + start * a.strides[4];
    const T *pb = b.data + offset_of(b.strides, s) + start * b.strides[3];
    const int warp = threadIdx.x / 32, part_m = warp % WARPS_M, part_n = warp / WARPS_M;
    Operand<TILE_M, PART_M, VEC_A, A_ALONG_K, false> left(pa, a.strides[3], a.strides[4], s.row, w.m, part_m);
    Operand<TILE_N, PART_N, VEC_B, B_ALONG_K, true> right(pb, b.strides[4], b.strides[3], s.column, w.n, part_n);

    float sum[PART_M / 16][PART_N / 8][4], row_sum[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        row_sum[e] = 0.0f;
#pragma unroll
        for (int i = 0; i < PART_M / 16; i++)
#pragma unroll
            for (int j = 0; j < PART_N / 8; j++) sum[i][j][e] = 0.0f;
    }

    // A ring of stages, each of a tile of a and one of b: while one is multiplied the copies to all others but the next
    // are on their way. Beyond the last tile zeros are copied, so that all rounds are alike.
    const int TILE_A = TILE_M * TILE_K * (int)sizeof(T), STAGE = (TILE_M + TILE_N) * TILE_K * (int)sizeof(T);
    int depth = min(piece.count * TILE_K, k - piece.first * TILE_K);
    int now = 0, next = 0;
    const auto fetch = [&] {
        left.fetch(copies, shared + next, depth);
        right.fetch(copies, shared + next + TILE_A, depth);
        copies.commit();
        depth -= TILE_K;
        next = next == (STAGES - 1) * STAGE ? 0 : next + STAGE;
    };
#pragma unroll
    for (int i = 1; i < STAGES; i++) fetch();
    copies.wait<STAGES - 2>();
    __syncthreads();

    unsigned x[2][PART_M / 16][4], y[2][PART_N / 16][4];
    left.get(x[0], shared + now, 0);
    right.get(y[0], shared + now + TILE_A, 0);
    for (int round = 0; round < piece.count; round++) {
        const bool sums_rows = part_n == 0 && w.sums_rows(piece, s.column, round);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            // The fragments of the next step; the last one's are in the next tile, which is here once all have come by.
            // All have then read the last of the tile in `now`, too, to whose place the first step of a round copies.
            if (step == STEPS - 1) {
                copies.wait<STAGES - 2>();
                __syncthreads();
                now = now == (STAGES - 1) * STAGE ? 0 : now + STAGE;
            }
            left.get(x[(step + 1) % 2], shared + now, (step + 1) % STEPS);
            right.get(y[(step + 1) % 2], shared + now + TILE_A, (step + 1) % STEPS);
            if (step == 0) fetch();
            auto &u = x[step % 2];
            auto &v = y[step % 2];
#pragma unroll
            for (int r = 0; r < 4; r++) {
#pragma unroll
                for (int i = 0; i < PART_M / 16; i++) u[i][r] = rounded<T>(u[i][r]);
#pragma unroll
                for (int j = 0; j < PART_N / 16; j++) v[j][r] = rounded<T>(v[j][r]);
            }
#pragma unroll
            for (int i = 0; i < PART_M / 16; i++) {
#pragma unroll
                for (int j = 0; j < PART_N / 8; j++) {
                    const int r = j % 2 * 2;
                    add_product<T>(sum[i][j], u[i], v[j / 2][r], v[j / 2][r + 1]);
                }
                // Times ones in column i, so that the row sums of all fragments are columns of one matrix.
                const unsigned one = quad() == i ? ones<T>() : 0;
                if (sums_rows) add_product<T>(row_sum, u[i], one, one);
            }
        }
    }

    copies.wait<0>();  // for the zeros, before another piece's copies to the same place

    const Spot here = later.spot;
    float *slot = later.slot < 0 ? nullptr : parts + later.slot * slot_size();
    const long long base = offset_of(to.c.strides, here);
#pragma unroll
    for (int h = 0; h < PART_N / 32; h++) {
        const int column = part_n * PART_N + h * 32 + in_quad() * 8;
        float bias[8];
        bias_of(to.bias, to.n, here.column + column, bias);
#pragma unroll
        for (int i = 0; i < PART_M / 8; i++) {
            const int row = part_m * PART_M + i * 8 + quad();
            float part[4][2], v[8];
#pragma unroll
            for (int j = 0; j < 8; j++) part[j / 2][j % 2] = sum[i / 2][4 * h + j / 2][i % 2 * 2 + j % 2];
            quad_transpose(part);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = part[j / 2][j % 2];
            if (slot) {
                store(slot + row * TILE_N + column, {v[0], v[1], v[2], v[3]});
                store(slot + row * TILE_N + column + 4, {v[4], v[5], v[6], v[7]});
            } else {
                to.put(base, here.row + row, here.column + column, v, bias);
            }
        }
    }
    if (ROW_SUMS && part_n == 0) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int i = in_quad() * 2 + e % 2, row = part_m * PART_M + i * 16 + e / 2 * 8 + quad();
            if (i >= PART_M / 16) continue;
            if (slot) slot[TILE_M * TILE_N + row] = row_sum[e];
            else if (here.column == 0 && here.row + row < w.m) sums[here.row + row] = row_sum[e];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_sm80(SCRATCH Strided<OUT> c, SCRATCH Strided<OUT> pre, SCRATCH float *sums, SCRATCH float *parts,
              Strided<const T> a, Strided<const T> b, const T *bias, Strided<const OUT> other, int m, int n, int k,
              int batches, int batch1, int batch2, int slices, int whole, int per, float alpha, float beta) {
    DYNAMIC_SHARED(char, shared);
    __shared__ Later later;
    Copies copies;
    const Work w(m, n, k, batches, batch1, batch2, slices, whole, per);
    const Result to{c, pre.data, other.data, bias, m, n, alpha, beta};
    w.for_pieces(blockIdx.x, [&](const Piece &piece) {
        multiply(piece, w, to, sums, parts, a, b, k, shared, later, copies);
        __syncthreads();  // before the next piece's copies
    });
}
