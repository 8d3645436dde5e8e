// What sm_90a has beyond other GPUs, each with the section of the PTX ISA manual (9.0) that it follows: barriers in
// shared memory that count bytes, copies by the tensor memory accelerator (TMA), products by a warpgroup (wgmma), and
// clusters of blocks. Compiled for sm_90a alone, where warps are 32 wide.
#pragma once
#include "common.cuh"

// A matrix, or a batch of them, as the copy engine knows it: what cuTensorMapEncodeTiled makes, of five axes, of which
// the first two are a matrix's.
struct alignas(64) Tiled {
    unsigned long long map[16];
};

__device__ __forceinline__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

// ---- clusters: 'Special Registers: %cluster_ctarank', 'barrier.cluster'

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// A barrier of one warpgroup, of which the number is below 15 ('bar').
__device__ __forceinline__ void group_barrier(int number) {
    asm volatile("bar.sync %0, 128;" ::"r"(number + 1) : "memory");
}

// ---- 'Parallel Synchronization and Communication Instructions: mbarrier'

typedef unsigned long long Barrier;

__device__ __forceinline__ void init(Barrier *b, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals));
}

// Makes the inits known to the cluster, after a barrier.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Makes what this thread wrote to shared memory known to the engines, after a barrier ('fence.proxy').
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Arrives, and says how many bytes the phase must see.
__device__ __forceinline__ void expect(Barrier *b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void arrive(Barrier *b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}

// Arrives at the same barrier of a block of the cluster.
__device__ __forceinline__ void arrive(Barrier *b, unsigned rank) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(b)),
        "r"(rank)
        : "memory");
}

// Waits for the end of the phase of that parity.
__device__ __forceinline__ void wait(Barrier *b, unsigned parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::
            "r"(shared_address(b)),
        "r"(parity)
        : "memory");
}

// ---- 'Data Movement and Conversion Instructions: cp.async.bulk.tensor'

// A box of an operand, from column x and row y of its memory on, to shared memory: of this block, or of all BLOCKS of
// the cluster at the same place in each. The barrier, in each of them, counts its bytes.
template <int BLOCKS = 1>
__device__ __forceinline__ void copy_box(void *to, const Tiled &from, int x, int y, const int (&batch)[3], Barrier *b) {
    if constexpr (BLOCKS == 1)
        asm volatile(
            "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, "
            "%6}], [%7];" ::"r"(shared_address(to)),
            "l"(&from), "r"(x), "r"(y), "r"(batch[2]), "r"(batch[1]), "r"(batch[0]), "r"(shared_address(b))
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
            "{%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address(to)),
            "l"(&from), "r"(x), "r"(y), "r"(batch[2]), "r"(batch[1]), "r"(batch[0]), "r"(shared_address(b)),
            "h"((short)((1 << BLOCKS) - 1))
            : "memory");
}

__device__ __forceinline__ void prefetch(const Tiled &operand) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&operand) : "memory");
}

// A box of shared memory to memory, but for what lies outside; each is a group of this thread's.
__device__ __forceinline__ void store_box(const Tiled &to, int x, int y, const int (&batch)[3], const void *from) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];\n"
        "cp.async.bulk.commit_group;" ::"l"(&to),
        "r"(x), "r"(y), "r"(batch[2]), "r"(batch[1]), "r"(batch[0]), "r"(shared_address(from))
        : "memory");
}

// Waits until no more than the last N of this thread's groups are still to be read from shared memory.
template <int N>
__device__ __forceinline__ void wait_stores() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// 'stmatrix': four 8 x 8 matrices of 16-bit elements; lane 8 i + r gives the address of row r of the i-th, and each
// lane has of each the two neighbours in row lane / 4 from column lane % 4 * 2 on.
__device__ __forceinline__ void store_matrices(void *row, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// ---- 'Miscellaneous Instructions: setmaxnreg'

template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- 'Asynchronous Warpgroup Level Matrix Instructions'

// Of an address, what a descriptor takes: above these bits is the rank of the block in its cluster.
__device__ __forceinline__ unsigned units_of_16(const void *p) { return (shared_address(p) & 0x3ffff) >> 4; }

// 'Matrix Descriptor': 128-byte swizzle, 1024 bytes from one group of eight rows of 128 bytes to the next. An operand
// along M or N has 64 elements a row, and `apart` bytes from one such panel to the next.
__device__ __forceinline__ unsigned long long describe(const void *tile, int apart) {
    return (1ull << 62) | (64ull << 32) | ((unsigned long long)(apart >> 4) << 16) | units_of_16(tile);
}

// The same for what is not swizzled: a core matrix, eight rows of 16 bytes, after another.
__device__ __forceinline__ unsigned long long describe_plain(const void *tile) {
    return (16ull << 32) | (8ull << 16) | units_of_16(tile);
}

__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until no more than the last N commits are under way.
template <int N>
__device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define ALL_8 FOUR(0)
#define ALL_128 SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
#define ALL_192 ALL_128, SIXTEEN(64), SIXTEEN(80)
#define ALL_256 ALL_192, SIXTEEN(96), SIXTEEN(112)
#define TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define NAMES_8 "%0,%1,%2,%3"
#define NAMES_128 TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63"
#define NAMES_192 TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) "%90,%91,%92,%93,%94,%95"
#define NAMES_256                                                                                                   \
    TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) TEN(11) "%120,%121,%122,%123,%124," \
    "%125,%126,%127"
#define PRODUCT(n, type, w, x, y, z)                                                                                 \
    asm volatile("{\n.reg .pred yes;\nsetp.eq.u32 yes, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type  \
                 "." type " {" NAMES_##n "}, %" #w ", %" #x ", yes, 1, 1, %" #y ", %" #z ";\n}"                      \
                 : ALL_##n                                                                                           \
                 : "l"(a), "l"(b), "n"(TURN_A), "n"(TURN_B))
#define PRODUCT_OF(n, w, x, y, z)                               \
    if constexpr (N == n) {                                     \
        if constexpr (BRAIN) PRODUCT(n, "bf16", w, x, y, z);    \
        else PRODUCT(n, "f16", w, x, y, z);                     \
    }

// 'wgmma.mma_async': d += a b for 64 x 16 by 16 x N elements of type U, under way when it returns. Thread t of the
// warpgroup has of d row t / 32 * 16 + t % 32 / 4 + 8 h, columns 8 j + t % 4 * 2 + e in d[4 j + 2 h + e]. TURN_A,
// TURN_B: whether the operand lies along M or N, not along K.
template <typename U, int N, int TURN_A, int TURN_B>
__device__ __forceinline__ void multiply_add(float (&d)[N / 2], unsigned long long a, unsigned long long b) {
    constexpr bool BRAIN = is_bfloat16<U>::value;
    PRODUCT_OF(8, 4, 5, 6, 7)
    PRODUCT_OF(128, 64, 65, 66, 67)
    PRODUCT_OF(192, 96, 97, 98, 99)
    PRODUCT_OF(256, 128, 129, 130, 131)
}
