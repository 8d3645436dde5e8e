// What gemm.cu, gemm_sm80.cu and gemm_sm90.cu share: which worker multiplies what, and what becomes of the sums.
//
// Work. A tile is TILE_M x TILE_N elements of c; all tiles, of one batch after another, are numbered in the order of
// `spot`. Along K a tile is cut into `slices` units of `blocks` steps of TILE_K, and units are numbered slice by slice:
// those that run at one time read the same part of a and b, once from memory. The first `whole` units go each to one
// worker. The others are too few to give every worker one: laid end to end, steps and all, they are cut into ranges of
// `per` steps, at most a unit's ("Stream-K", arXiv:2301.03598). Sums of less than a tile go to slots of `parts`, where
// gemm_sum finds and adds them in the order of K.
//
// Sums. EPILOGUE says what becomes of v = alpha a b + bias:
//   PLAIN  c = v                GELU   pre = v, rounded, if pre is there, and c = GELU(that)
//   ADD    c = v + beta other   SLOPE  c = v GELU'(other)       other is laid out as c, and may be c
// and ROW_SUMS, whether `sums` gets the sum of each row of a (of one batch), which the tiles of a few columns make.
#pragma once
#include "common.cuh"

#define PLAIN 0
#define ADD 1
#define GELU 2
#define SLOPE 3
#if EPILOGUE >= GELU
#include "gelu.cuh"
#endif

// Where a tile begins: row, column, and number along the batch axes.
struct Spot {
    int row, column, batch[3];
};

// A tile's worth of work or less: `count` steps from `first` on, and the slot for their sums; -1: they go to c.
struct Piece {
    int tile, first, count, slot;
};

struct Work {
    int m, n, batch1, batch2, tiles_m, tiles_n, tiles, slices, blocks, whole, per;

    __device__ __forceinline__ Work(int m, int n, int k, int batches, int batch1, int batch2, int slices, int whole,
                                    int per)
        : m(m),
          n(n),
          batch1(batch1),
          batch2(batch2),
          tiles_m((m + TILE_M - 1) / TILE_M),
          tiles_n((n + TILE_N - 1) / TILE_N),
          tiles(tiles_m * tiles_n * batches),
          slices(slices),
          blocks(((k + TILE_K - 1) / TILE_K + slices - 1) / slices),
          whole(whole),
          per(per) {}

    // Slots: of whole units, if a tile has several, then two of each range.
    __device__ __forceinline__ int slot_of_range(int r) const { return (slices > 1 ? whole : 0) + 2 * r; }

    __device__ __forceinline__ Piece unit(int u) const {
        return {u % tiles, u / tiles * blocks, blocks, slices > 1 ? u : -1};
    }

    // Rows of a are added up by tiles of so many columns, each at its part of a unit's steps: where all sums go to slots
    // by several, so that none is late, else by the first.
    __device__ __forceinline__ int sharing() const { return slices > 1 ? min(tiles_n, 8) : 1; }

    // Of a piece's steps the first at which the tile in that column does so. They end where the next column's begin.
    __device__ __forceinline__ int sums_from(const Piece &piece, int column) const {
        const int from = blocks * min(column / TILE_N, sharing()) / sharing() - piece.first % blocks;
        return max(0, min(from, piece.count));
    }

    __device__ __forceinline__ bool sums_rows(const Piece &piece, int column, int step) const {
        return ROW_SUMS && step >= sums_from(piece, column) && step < sums_from(piece, column + TILE_N);
    }

    // f(slot) for each slot of a tile, in the order of K; none, and false, if one range had all of it.
    template <typename F>
    __device__ __forceinline__ bool for_slots(int tile, F f) const {
        const int units = slices > 1 ? min((max(whole - tile, 0) + tiles - 1) / tiles, slices) : 0;
#pragma unroll 4
        for (int i = 0; i < units; i++) f(i * tiles + tile);
        for (int i = units; i < slices; i++) {
            const int begin = (i * tiles + tile - whole) * blocks, r0 = begin / per, r1 = (begin + blocks - 1) / per;
            if (slices == 1 && r0 == r1) return false;
#pragma unroll 4
            for (int r = r0; r <= r1; r++) f(slot_of_range(r) + (r == r0 && begin > r * per));
        }
        return true;
    }

    // f(piece) for a unit, or for what is in a range, of which the numbers follow those of `whole` units: the end of a
    // unit, and the beginning of another.
    template <typename F>
    __device__ __forceinline__ void for_pieces(int item, F f) const {
        const bool all = item < whole;
        const int r = item - whole, end = all ? 1 : min((r + 1) * per, (tiles * slices - whole) * blocks);
        for (int at = all ? 0 : r * per; at < end;) {
            Piece piece = unit(all ? item : whole + at / blocks);
            if (!all) {
                const int first = at % blocks;
                piece.first += first, piece.count = min(blocks - first, end - at);
                if (piece.count < blocks || slices > 1) piece.slot = slot_of_range(r) + (at > r * per);
            }
            f(piece);
            at += all ? 1 : piece.count;
        }
    }
};

// What of a piece is wanted only at its end and waits in shared memory, where a thread has no register left for it.
struct Later {
    Spot spot;
    int slot;
};

// GROUP rows of tiles at a time, column by column: neighbours in time share tiles of a and of b in the L2 cache.
__device__ __forceinline__ Spot spot(const Work &w, int tile) {
    const int batch = tile / (w.tiles_m * w.tiles_n);
    tile -= batch * w.tiles_m * w.tiles_n;
    const int first = tile / (GROUP * w.tiles_n) * GROUP, rows = min(GROUP, w.tiles_m - first);
    tile -= first * w.tiles_n;
    return {(first + tile % rows) * TILE_M, tile / rows * TILE_N,
            {batch / w.batch2 / w.batch1, batch / w.batch2 % w.batch1, batch % w.batch2}};
}

// A slot: the sums of a tile, then those of rows of a.
__device__ constexpr long long slot_size() { return TILE_M * TILE_N + TILE_M; }

// The offset of a tile's batch in an operand.
__device__ __forceinline__ long long offset_of(const long long (&strides)[5], const Spot &s) {
    return s.batch[0] * strides[0] + s.batch[1] * strides[1] + s.batch[2] * strides[2];
}

// The bias, or zeros for none, of N of the n columns from j on.
template <int N>
__device__ __forceinline__ void bias_of(const T *bias, int n, int j, float (&b)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) b[i] = bias && j + i < n ? to_float(bias[j + i]) : 0.0f;
}

// v to what c gets, where `other` has `old`.
template <int N>
__device__ __forceinline__ void become(float (&v)[N], const float (&old)[N], float beta) {
    if (EPILOGUE == GELU) round_to<OUT>(v);
#pragma unroll
    for (int i = 0; i < N; i++) {
#if EPILOGUE == ADD
        v[i] += beta * old[i];
#elif EPILOGUE == GELU
        v[i] = gelu(v[i]);
#elif EPILOGUE == SLOPE
        v[i] *= gelu_slope(old[i]);
#endif
    }
}

// c, and what is laid out as it.
struct Result {
    Strided<OUT> c;
    OUT *pre;
    const OUT *other;
    const T *bias;
    int m, n;
    float alpha, beta;

    // N neighbours, `at` elements from the beginning of c, by one access each.
    template <int N>
    __device__ __forceinline__ void put_together(long long at, float (&v)[N]) const {
        float old[N];
        if (EPILOGUE == ADD || EPILOGUE == SLOPE) load(old, other + at);
        if (EPILOGUE == GELU && pre) store(pre + at, v);
        become(v, old, beta);
        store(c.data + at, v);
    }

    // N sums of row i from column j on, of the batch that begins at `base`; b: their bias. VEC_C: how many elements of
    // c an access takes, 16 bytes of them, or 1.
    template <int N>
    __device__ __forceinline__ void put(long long base, int i, int j, const float (&sum)[N],
                                        const float (&b)[N]) const {
        if (i >= m) return;
        const long long at = base + i * c.strides[3] + j * c.strides[4];
        const int TOGETHER = N * sizeof(OUT) <= 16 ? N : 16 / sizeof(OUT);
#pragma unroll
        for (int h = 0; h < N; h += TOGETHER) {
            float v[TOGETHER];
#pragma unroll
            for (int e = 0; e < TOGETHER; e++) v[e] = alpha * sum[h + e] + b[h + e];
            if (VEC_C > 1 && j + h + TOGETHER <= n) {
                put_together(at + h, v);
            } else {
#pragma unroll
                for (int e = 0; e < TOGETHER; e++) {
                    float one[1] = {v[e]};
                    if (j + h + e < n) put_together(at + (h + e) * c.strides[4], one);
                }
            }
        }
    }
};

// To a slot, the sums of a warp as matrix cores leave them: in sum[i][4 j ...] two neighbours of row `row` + i APART of
// the tile from column `column` + 8 j on, and two of the row eight further down.
template <int APART, int I, int J4>
__device__ __forceinline__ void put_sums(float *slot, int row, int column, const float (&sum)[I][J4]) {
#pragma unroll
    for (int i = 0; i < I; i++)
#pragma unroll
        for (int j = 0; j < J4; j += 2)
            store<2>(slot + (row + i * APART + j / 2 % 2 * 8) * TILE_N + column + j / 4 * 8,
                     {sum[i][j], sum[i][j + 1]});
}

// The tiles that were multiplied in pieces: a block for 2048 elements of one, a thread for four neighbours in a row and,
// 1024 elements on, four more, so that enough loads are on their way at once.
extern "C" __global__ void __launch_bounds__(256, 4)
    gemm_sum(SCRATCH Strided<OUT> c, SCRATCH Strided<OUT> pre, SCRATCH float *sums, const float *parts, const T *bias,
             Strided<const OUT> other, int m, int n, int k, int batches, int batch1, int batch2, int slices, int whole,
             int per, float alpha, float beta) {
    const Work w(m, n, k, batches, batch1, batch2, slices, whole, per);
    const int blocks_each = TILE_M * TILE_N / 2048, tile = blockIdx.x / blocks_each + (slices > 1 ? 0 : whole);
    const int block = blockIdx.x % blocks_each, first = 2048 * block + 4 * threadIdx.x;
    float sum[2][4] = {};
    const bool any = w.for_slots(tile, [&](long long slot) {
        const float *part = parts + slot * slot_size() + first;
        float more[2][4];
        load(more[0], part), load(more[1], part + 1024);
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i / 4][i % 4] += more[i / 4][i % 4];
    });
    if (!any) return;
    const Spot s = spot(w, tile);
    const Result to{c, pre.data, other.data, bias, m, n, alpha, beta};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int e = first + 1024 * h, column = s.column + e % TILE_N;
        float b[4];
        bias_of(bias, n, column, b);
        to.put(offset_of(c.strides, s), s.row + e / TILE_N, column, sum[h], b);
    }
    const int row = 256 * block + threadIdx.x, group = s.row / TILE_M / GROUP * GROUP;
    if (ROW_SUMS && s.column == 0 && row < TILE_M && s.row + row < m) {
        float row_sum = 0.0f;
        for (int i = 0; i < w.sharing(); i++)  // the tiles beside this one, as `spot` numbers them
            w.for_slots(tile + i * min(GROUP, w.tiles_m - group),
                        [&](long long slot) { row_sum += parts[slot * slot_size() + TILE_M * TILE_N + row]; });
        sums[s.row + row] = row_sum;
    }
}
