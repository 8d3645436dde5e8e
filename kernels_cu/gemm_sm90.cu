// gemm_sm90: c = EPILOGUE(alpha a b + bias), as gemm.cuh has it, by the copy engine (TMA) and the warpgroup products
//            (wgmma) of NVIDIA's sm_90a; gemm_sum, there: the tiles that were multiplied in pieces
// Shapes    c (.., M, N) OUT, a (.., M, K) T, b (.., K, N) T, T of 16 bits, as tma.Tiled describes them, up to three
//           batch axes (B0, B1, B2), `batches` in all, where a and b may repeat; bias (N,) T or null; pre OUT, written
//           if `keep`; other OUT, laid out as c; sums (M,) fp32 or null; parts fp32, a slot for each unit or piece
//           that is less than a tile, or null
// Launch    a worker is a cluster of CLUSTER blocks, as many as run at once, each for its rows of a tile; block 128
//           (GROUPS + 1): a warpgroup of which a thread asks for copies, and those that multiply; dynamic shared memory
//           1024 + STAGES TILE_K (TILE_M / CLUSTER + TILE_N) 2 + 8192 GROUPS BUFFERS bytes
// Memory    a cluster's blocks read b together: a ceil(N / TILE_N) times, b ceil(M / TILE_M) times, mostly from the L2
//           cache, writes c; 2 M N K operations
// Numerics  products of T summed in fp32 by the matrix core, 16 along K at a time, rounded once at the end; no atomics
// Requires  sm_90a; K > 0; boxes of a (64, TILE_M / CLUSTER) along K (A_ALONG_K 1) or (64, 64) along M (0), of b (64,
//           TILE_N / CLUSTER) along K (B_ALONG_K 1) or (64, 64 / CLUSTER) along N (0), of c and pre (128 bytes, 16);
//           VEC_C > 1, for gemm_sum. TILE_N 128, 192 or 256. TANH, as in gelu.cuh, with EPILOGUE GELU and SLOPE
//           alone. Where the sums take most registers other things spill (docs/portability.md)
// Source    the PTX ISA (see hopper.cuh); the roles of warpgroups as CUTLASS describes them (doc/efficient_gemm.md,
//           Hopper warp specialization) and P. Shankhdhar, Outperforming cuBLAS on H100 (2024)
// Measured  see docs/gemm.md
#include "gemm.cuh"
#include "hopper.cuh"
#include "mma.cuh"

#define BLOCK_M (TILE_M / CLUSTER)  // a block's rows of a tile
// GROUPS warpgroups multiply: they share a block's tile, or two take turns, a tile each.
#define GROUP_M (TAKE_TURNS ? BLOCK_M : BLOCK_M / GROUPS)
#define EACH (GROUP_M / 64)
#define THREADS (128 * (GROUPS + 1))
// Registers of a thread that copies, and of one that multiplies, of 65536 in all.
#define WIDE (EACH * TILE_N > 256)  // whether sums take more than half of those
#define FEW (GROUPS == 2 && WIDE ? 40 : 56)
#define MANY (GROUPS == 3 ? 152 : WIDE ? 232 : 224)
#define ROW 128                // bytes of a row of shared memory, which the engines swizzle
#define SIXTY_FOUR (64 * ROW)  // bytes of 64 rows of a or columns of b by TILE_K
#define BYTES_A (BLOCK_M * ROW)
#define BYTES_B (TILE_N * ROW)

static_assert(TILE_K * sizeof(T) == ROW, "a step along K is a row of shared memory");
static_assert(!TAKE_TURNS || GROUPS == 2, "two take turns");
static_assert(EACH * 64 == GROUP_M, "a product has 64 rows");
static_assert(BUFFERS >= (EPILOGUE == GELU ? 2 : 1), "GELU has two results");

// The stage of the ring that comes next, and the parity of its round.
struct Ring {
    unsigned stage = 0, round = 0;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, round ^= 1;
    }

    __device__ __forceinline__ void skip(int steps) {
        steps += stage;
        round ^= steps / STAGES & 1;
        stage = steps % STAGES;
    }
};

struct Shared {
    char *stages;
    Barrier *full, *empty;  // of each stage
    Barrier *turn;          // of each warpgroup that multiplies
    const T *ones;

    __device__ __forceinline__ char *a(int stage) const { return stages + stage * (BYTES_A + BYTES_B); }
    __device__ __forceinline__ char *b(int stage) const { return a(stage) + BYTES_A; }
};

// f(piece, its number) for all pieces of this cluster, the same for whoever asks: units, and then a range.
template <typename F>
__device__ __forceinline__ void for_all(const Work &w, F f) {
    const int worker = blockIdx.x / CLUSTER, workers = gridDim.x / CLUSTER;
    int number = 0;
    for (int item = worker;; item += workers) {
        const bool range = item >= w.whole;
        w.for_pieces(range ? w.whole + worker : item, [&](const Piece &piece) { f(piece, number++); });
        if (range) break;
    }
}

// One thread asks for all copies, as far ahead as stages are free in all blocks of the cluster.
__device__ __forceinline__ void produce(const Shared &shared, const Work &w, const Tiled &a, const Tiled &b, int rank) {
    Ring ring;
    for_all(w, [&](const Piece &piece, int) {
        const Spot s = spot(w, piece.tile);
        const int row = s.row + rank * BLOCK_M;
#pragma unroll 1
        for (int i = 0; i < piece.count; i++, ring.next()) {
            const int depth = (piece.first + i) * TILE_K;
            Barrier *full = shared.full + ring.stage;
            wait(shared.empty + ring.stage, ring.round ^ 1);
            expect(full, BYTES_A + BYTES_B);
            char *to = shared.a(ring.stage);
            if (A_ALONG_K) {
                copy_box(to, a, depth, row, s.batch, full);
            } else {
#pragma unroll
                for (int j = 0; j < BLOCK_M / 64; j++)
                    copy_box(to + j * SIXTY_FOUR, a, row + 64 * j, depth, s.batch, full);
            }
            // Of b each block copies its part, to all.
            const int part = (B_ALONG_K ? TILE_N : TILE_K) / CLUSTER;
            to = shared.b(ring.stage) + rank * part * ROW;
            if (B_ALONG_K) {
                copy_box<CLUSTER>(to, b, depth, s.column + rank * part, s.batch, full);
            } else {
#pragma unroll
                for (int j = 0; j < TILE_N / 64; j++)
                    copy_box<CLUSTER>(to + j * SIXTY_FOUR, b, s.column + 64 * j, depth + rank * part, s.batch, full);
            }
        }
    });
}

// A warpgroup's products of a piece.
struct Multiply {
    const Shared &shared;
    Ring &ring;
    int first;  // of its rows the first of the block's, over 64
    float (&sum)[EACH][TILE_N / 2], (&rows)[EACH][4];

    __device__ __forceinline__ void release(int stage) const {
        const unsigned lane = threadIdx.x % 32;
        if (lane < CLUSTER) arrive(shared.empty + stage, lane);
    }

    // Those of some steps; with SUM_ROWS also a's with ones. last: whether no others follow.
    template <bool SUM_ROWS>
    __device__ __forceinline__ void steps(int count, bool last) {
        unsigned before = 0;
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            wait(shared.full + ring.stage, ring.round);
            const unsigned long long a = describe(shared.a(ring.stage) + first * SIXTY_FOUR, SIXTY_FOUR);
            const unsigned long long b = describe(shared.b(ring.stage), SIXTY_FOUR);
            fence_products();
#pragma unroll
            for (int k = 0; k < TILE_K / 16; k++) {
                // Sixteen elements further along K, in units of 16 bytes: within a row, or sixteen rows down.
                const int step_a = A_ALONG_K ? 2 * k : ROW * k, step_b = B_ALONG_K ? 2 * k : ROW * k;
#pragma unroll
                for (int j = 0; j < EACH; j++) {
                    const unsigned long long of_a = a + j * (SIXTY_FOUR / 16) + step_a;
                    multiply_add<T, TILE_N, !A_ALONG_K, !B_ALONG_K>(sum[j], of_a, b + step_b);
                    if (SUM_ROWS) multiply_add<T, 8, !A_ALONG_K, 0>(rows[j], of_a, describe_plain(shared.ones));
                }
            }
            commit_products();
            wait_products<1>();  // those of the step before: its stage is free
            if (i) release(before);
            before = ring.stage;
            ring.next();
        }
        if (TAKE_TURNS && last && threadIdx.x % 32 == 0) arrive(shared.turn + (threadIdx.x / 128 == 1));
        wait_products<0>();
        if (count) release(before);
    }

    __device__ __forceinline__ void operator()(const Work &w, const Piece &piece, int column) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
#pragma unroll
            for (int j = 0; j < TILE_N / 2; j++) sum[i][j] = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) rows[i][j] = 0.0f;
        }
        if (ROW_SUMS) {
            // Three loops, each to its end: products within a branch of one would wait for one another (ptxas, C7519).
            const int begin = w.sums_from(piece, column), end = w.sums_from(piece, column + TILE_N);
            steps<false>(begin, false);
            steps<true>(end - begin, false);
            steps<false>(piece.count - end, true);
        } else {
            steps<false>(piece.count, true);
        }
    }
};

// A warp's sums become c in panels of sixteen rows and 128 bytes of columns, which lie swizzled in shared memory: what
// `other` has comes there by the copy engine, and what becomes of it goes that way to memory.
#define PANEL_N (128 / (int)sizeof(OUT))
#define PANELS (TILE_N / PANEL_N * EACH)
#define PANEL_BYTES (16 * 128)
#define READS (EPILOGUE == ADD || EPILOGUE == SLOPE)

struct Epilogue {
    const Tiled &c, &pre, &other;
    const T *bias;  // of the tile, in shared memory; or null
    bool keep;
    float alpha, beta;
    char *buffers;     // this warp's
    Barrier *arrived;  // of each buffer
    unsigned rounds = 0;

    __device__ __forceinline__ char *buffer(int i) const { return buffers + i % BUFFERS * PANEL_BYTES; }

    // A panel's first column and row, beyond those of the tile and of the warp.
    __device__ __forceinline__ static int column(int panel) { return panel / EACH * PANEL_N; }
    __device__ __forceinline__ static int row(int panel) { return panel % EACH * 64; }

    // Asks for what `other` has of a panel, once nothing is left to be read from its buffer.
    __device__ __forceinline__ void fetch(const Spot &s, int first_row, int panel) const {
        if (threadIdx.x % 32) return;
        wait_stores<0>();
        Barrier *b = arrived + panel % BUFFERS;
        expect(b, PANEL_BYTES);
        copy_box(buffer(panel), other, s.column + column(panel), s.row + first_row + row(panel), s.batch, b);
    }

    __device__ __forceinline__ void begin(const Spot &s, int first_row) const {
#pragma unroll
        for (int i = 0; i < (PANELS < BUFFERS ? PANELS : BUFFERS); i++)
            if (READS) fetch(s, first_row, i);
    }

    // Where in a buffer this lane's row is of the two 8 x 8 matrices, below one another, of columns 16 j on, or the two
    // beside them: of 16-bit elements.
    __device__ __forceinline__ static int place(int j) {
        const int lane = threadIdx.x % 32, row = lane % 16;
        return row * 128 + ((2 * j + lane / 16) ^ row % 8) * 16;
    }

    // Where two neighbours are of row lane / 4 + 8 h, columns 16 j + 8 g + 2 (lane % 4), of 32 bits each.
    __device__ __forceinline__ static int place(int j, int h, int g) {
        const int lane = threadIdx.x % 32, row = lane / 4 + 8 * h;
        return row * 128 + ((4 * j + 2 * g + lane % 4 / 2) ^ row % 8) * 16 + lane % 2 * 8;
    }

    // Columns 16 j on of a buffer: x[h] has of row lane / 4 + 8 h two neighbours, and two eight further on.
    template <typename U>
    __device__ __forceinline__ static void read(float (&x)[2][4], const char *from, int j) {
        if constexpr (sizeof(U) == 2) {
            unsigned words[4];
            load_matrices<false>(words, from + place(j));
#pragma unroll
            for (int i = 0; i < 8; i++) x[i / 2 % 2][i / 4 * 2 + i % 2] = unpack<U>(words[i / 2], i % 2);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float pair[2];
                load(pair, (const float *)(from + place(j, i % 2, i / 2)));
                x[i % 2][i / 2 * 2] = pair[0], x[i % 2][i / 2 * 2 + 1] = pair[1];
            }
        }
    }

    template <typename U>
    __device__ __forceinline__ static void write(char *to, int j, const float (&x)[2][4]) {
        if constexpr (sizeof(U) == 2)
            store_matrices(to + place(j), pack<U>(x[0][0], x[0][1]), pack<U>(x[1][0], x[1][1]),
                           pack<U>(x[0][2], x[0][3]), pack<U>(x[1][2], x[1][3]));
        else
#pragma unroll
            for (int i = 0; i < 4; i++)
                store<2>((float *)(to + place(j, i % 2, i / 2)), {x[i % 2][i / 2 * 2], x[i % 2][i / 2 * 2 + 1]});
    }

    // What becomes of a panel's sums goes to its buffer `last`, and pre to `first`, if it is there.
    __device__ __forceinline__ void fill(const float (&sum)[TILE_N / 2], int panel, char *first, char *last) const {
        // Columns of the bias, two a word, all at once: each load waits behind the matrix core's of shared memory.
        unsigned b[PANEL_N / 8];
#pragma unroll
        for (int i = 0; i < PANEL_N / 8; i++)
            b[i] = bias ? *(const unsigned *)(bias + column(panel) + 8 * i + threadIdx.x % 4 * 2) : 0;
#pragma unroll
        for (int j = 0; j < PANEL_N / 16; j++) {
            float x[2][4], old[2][4];
            if (READS) read<OUT>(old, last, j);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int g = i / 4, h = i / 2 % 2, e = i % 2;
                x[h][2 * g + e] = alpha * sum[column(panel) / 2 + 8 * j + i] + unpack<T>(b[2 * j + g], e);
            }
            if (first) write<OUT>(first, j, x);
#pragma unroll
            for (int h = 0; h < 2; h++) become(x[h], old[h], beta);
            write<OUT>(last, j, x);
        }
    }

    // first_row: the warp's in the tile.
    __device__ __forceinline__ void operator()(const float (&sum)[EACH][TILE_N / 2], const Spot &s, int first_row) {
        const bool two = EPILOGUE == GELU && keep;
#pragma unroll
        for (int p = 0; p < PANELS; p++) {
            char *last = buffer(two ? 2 * p + 1 : p), *first = two ? buffer(2 * p) : nullptr;
            if (READS) {
                if (p > 0 && p - 1 + BUFFERS < PANELS) fetch(s, first_row, p - 1 + BUFFERS);
                wait(arrived + p % BUFFERS, rounds >> p % BUFFERS & 1);
                rounds ^= 1 << p % BUFFERS;
            } else {
                // Lane 0 alone has stores. Those of the last tile are done when the first panel waits for all.
                if (p == 0) wait_stores<0>();
                else if (two) wait_stores<BUFFERS - 2>();
                else wait_stores<BUFFERS - 1>();
                SYNC_WARP();
            }
            fill(sum[p % EACH], p, first, last);
            publish_shared();
            SYNC_WARP();
            if (threadIdx.x % 32 == 0) {
                const int x = s.column + column(p), y = s.row + first_row + row(p);
                if (two) store_box(pre, x, y, s.batch, first);
                store_box(c, x, y, s.batch, last);
            }
        }
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    gemm_sm90(const __grid_constant__ Tiled c, const __grid_constant__ Tiled pre, SCRATCH float *sums,
              SCRATCH float *parts, const __grid_constant__ Tiled a, const __grid_constant__ Tiled b, const T *bias,
              const __grid_constant__ Tiled other, bool keep, int m, int n, int k, int batches, int batch1, int batch2,
              int slices, int whole, int per, float alpha, float beta) {
    __shared__ Barrier barriers[2 * STAGES + GROUPS + 4 * GROUPS * BUFFERS];
    __shared__ __align__(128) T ones[128];  // 16 x 8 of them
    __shared__ __align__(4) T biases[GROUPS][TILE_N];
    DYNAMIC_SHARED(char, room);
    char *stages = room + (-shared_address(room) & 1023);  // swizzles follow the address
    const Shared shared{stages, barriers, barriers + STAGES, barriers + 2 * STAGES, ones};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            init(shared.full + i, 1);
            init(shared.empty + i, CLUSTER * 4 * (TAKE_TURNS ? 1 : GROUPS));  // all warps that read it
        }
        for (int i = 0; i < GROUPS; i++) init(shared.turn + i, 4);
        for (int i = 0; i < 4 * GROUPS * BUFFERS; i++) init(shared.turn + GROUPS + i, 1);
        prefetch(a), prefetch(b), prefetch(c);
    }
    if (threadIdx.x < 128) ones[threadIdx.x] = to<T>(1.0f);
    publish_barriers();
    publish_shared();
    if (CLUSTER > 1) cluster_barrier();
    else __syncthreads();

    const Work w(m, n, k, batches, batch1, batch2, slices, whole, per);
    const int rank = CLUSTER > 1 ? cluster_rank() : 0;
    if (threadIdx.x < 128) {
        give_registers<FEW>();
        if (threadIdx.x == 0) produce(shared, w, a, b, rank);
    } else {
        take_registers<MANY>();
        const int mine = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
        const int first = TAKE_TURNS ? 0 : mine * EACH, row = rank * BLOCK_M + first * 64 + warp % 4 * 16;
        T *of_tile = bias ? biases[mine] : nullptr;
        Epilogue epilogue{c, pre, other, of_tile, keep, alpha, beta, shared.a(STAGES) + warp * BUFFERS * PANEL_BYTES,
                          shared.turn + GROUPS + warp * BUFFERS};
        Ring ring;
        for_all(w, [&](const Piece &piece, int number) {
            if (TAKE_TURNS && number % GROUPS != mine) {
                ring.skip(piece.count);
                return;
            }
            const Spot s = spot(w, piece.tile);
            if (piece.slot < 0) {
                epilogue.begin(s, row);
                if (of_tile) {
                    group_barrier(mine);  // all have read those of the last tile
                    for (int i = threadIdx.x % 128; i < TILE_N; i += 128)
                        of_tile[i] = s.column + i < n ? bias[s.column + i] : to<T>(0.0f);
                    group_barrier(mine);
                }
            }
            if (TAKE_TURNS) {
                // A turn begins when the other group has seen its last stage full, since a parity does not tell a round
                // from the one after the next.
                wait(shared.turn + mine, number / GROUPS + 1 - mine & 1);
            }
            float sum[EACH][TILE_N / 2], rows[EACH][4];
            Multiply{shared, ring, first, sum, rows}(w, piece, s.column);

            float *slot = piece.slot < 0 ? nullptr : parts + piece.slot * slot_size();
            if (slot) put_sums<64>(slot, row + lane / 4, lane % 4 * 2, sum);
            else epilogue(sum, s, row);
            if (ROW_SUMS && lane % 4 == 0) {
#pragma unroll
                for (int i = 0; i < EACH; i++)
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const int y = row + lane / 4 + 64 * i + 8 * h;
                        if (slot) slot[TILE_M * TILE_N + y] = rows[i][2 * h];
                        else if (s.column == 0 && s.row + y < m) sums[s.row + y] = rows[i][2 * h];
                    }
            }
        });
        wait_stores<0>();  // shared memory must last until it is read
    }
    if (CLUSTER > 1) cluster_barrier();  // and a block until the others' copies and arrivals have come
}
