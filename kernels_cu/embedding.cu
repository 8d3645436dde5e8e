// embedding_fwd: y = weight[ids];  embedding_bwd_acc, embedding_bwd_rest_acc: dweight[v] += the sum of dy where ids = v
// Shapes    ids, order (R,); weight (V, C) T; y, dy (R, C) T; dweight (V, C) fp32. order sorts the ids, equal ones as
//           they stood. The sorted rows are cut into P = ceil(R / ROWS) parts: partial (P, C) fp32, first (P,)
// Launch    COLUMNS threads along a row, each for VEC elements. Forward: grid ceil(R / 8), block (COLUMNS, 8).
//           Backward: grid (ceil(P / 4), ceil(C / (COLUMNS VEC))), block (COLUMNS, 4); then grid (P, the same), block
//           (COLUMNS, LANES). ROWS, COLUMNS and LANES are those of ops/embedding.py
// Memory    forward reads R rows and writes them; backward reads dy once, reads and writes dweight once for each id,
//           and writes and reads a row of partial for each part that begins inside an id's rows; R C additions
// Numerics  fp32: sums of at most ROWS rows, then LANES interleaved sums of these, in an order that depends on the ids
//           alone; no atomics
// Requires  VEC > 1: C a multiple of VEC, and pointers to T and float that are multiples of VEC elements. An id outside
//           [0, V), which the caller reports, reads row 0 and adds nothing
// Source    segmented sums: Blelloch, Prefix sums and their applications (CMU-CS-90-190, 1990), section 1.5
// Measured  NVIDIA H200, 2026-11-29, commit 14d502b: bfloat16, 32768 rows of 768, V = 50257: forward 22 us, 68 % of the
//           copy ceiling, backward 170 us with the sort
#include "common.cuh"

#define BATCH 8  // loads in flight

extern "C" __global__ void __launch_bounds__(256)
    embedding_fwd(T *y, const T *weight, const ID *ids, long long R, int C, long long V) {
    long long r = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (r >= R) return;
    long long id = ids[r];
    const T *from = weight + (0 <= id && id < V ? id : 0) * C;
    for (int c = threadIdx.x * VEC; c < C; c += COLUMNS * VEC)
        *(Vector<T, VEC> *)(y + r * C + c) = *(const Vector<T, VEC> *)(from + c);
}

__device__ __forceinline__ void add(float (&sum)[VEC], const float (&x)[VEC]) {
#pragma unroll
    for (int k = 0; k < VEC; k++) sum[k] += x[k];
}

__device__ __forceinline__ void add_to(float *there, const float (&x)[VEC]) {
    float sum[VEC];
    load(sum, there);
    add(sum, x);
    store(there, sum);
}

// A thread walks down the sorted rows of a part and adds the sum of each id's to dweight. The exception are rows at the
// beginning that go on with the id of the part before: their sum becomes `partial`, their id `first`, else -1.
extern "C" __global__ void __launch_bounds__(COLUMNS * 4, 4)
    embedding_bwd_acc(UPDATED float *dweight, UPDATED float *partial, ID *first, const T *dy, const ID *ids,
                      const long long *order, long long R, int C, long long V) {
    long long part = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    long long begin = part * ROWS, end = begin + ROWS < R ? begin + ROWS : R;
    int c = (blockIdx.y * COLUMNS + threadIdx.x) * VEC;
    if (begin >= R || c >= C) return;

    ID id = ids[order[begin]];
    bool goes_on = begin > 0 && ids[order[begin - 1]] == id;
    if (c == 0) first[part] = goes_on ? id : -1;
    float sum[VEC] = {};
    auto finish = [&] {
        if (goes_on) store(partial + part * C + c, sum);
        else if (0 <= id && id < V) add_to(dweight + (long long)id * C + c, sum);
    };
    for (long long i = begin; i < end; i += BATCH) {
        ID next[BATCH];
        float row[BATCH][VEC];
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            if (i + j >= end) continue;
            long long r = order[i + j];
            next[j] = ids[r];
            load(row[j], dy + r * C + c);
        }
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            if (i + j >= end) continue;
            if (next[j] != id) {
                finish();
                goes_on = false;
                id = next[j];
#pragma unroll
                for (int k = 0; k < VEC; k++) sum[k] = 0.0f;
            }
            add(sum, row[j]);
        }
    }
    finish();
}

// The block of the part where an id goes on for the first time sums what that part and those after it have of the id.
extern "C" __global__ void __launch_bounds__(COLUMNS * LANES)
    embedding_bwd_rest_acc(UPDATED float *dweight, const float *partial, const ID *first, long long P, int C,
                           long long V) {
    __shared__ float sums[LANES][COLUMNS * VEC];
    long long part = blockIdx.x;
    ID id = first[part];
    if (id < 0 || id >= V || first[part - 1] == id) return;  // the very first part has -1

    int c = (blockIdx.y * COLUMNS + threadIdx.x) * VEC;
    float sum[VEC] = {};
    bool more = c < C;
    for (long long i = part + threadIdx.y; more; i += LANES * BATCH) {
        float row[BATCH][VEC] = {};
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            long long p = i + j * LANES;
            more = p < P && first[p] == id;
            if (more) load(row[j], partial + p * C + c);
        }
#pragma unroll
        for (int j = 0; j < BATCH; j++) add(sum, row[j]);
    }
#pragma unroll
    for (int k = 0; k < VEC; k++) sums[threadIdx.y][threadIdx.x * VEC + k] = sum[k];
    __syncthreads();
    if (threadIdx.y > 0 || c >= C) return;
    for (int lane = 1; lane < LANES; lane++) {
#pragma unroll
        for (int k = 0; k < VEC; k++) sum[k] += sums[lane][threadIdx.x * VEC + k];
    }
    add_to(dweight + (long long)id * C + c, sum);
}
