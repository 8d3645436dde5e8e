// The matrix cores of NVIDIA GPUs, sm_80 and newer, and what feeds them: a function for each PTX instruction, with its
// section of NVIDIA's manual "Parallel Thread Execution ISA". The host build does what the manual says; for other GPUs
// there is nothing here but quad_transpose. A warp has 32 lanes, in eight quads of four.
//
// A fragment is 16 rows of a by 32 bytes along K, or 8 columns of b. Of each row a lane has words of 32 bits, two
// elements of 16 bits or one of 32: of a in x[0] word in_quad() of row quad(), in x[1] that of row quad() + 8, and in
// x[2] and x[3] the words four further; of b the two words of column quad().
#pragma once
#include "common.cuh"

__device__ __forceinline__ int quad() { return threadIdx.x % 32 / 4; }

__device__ __forceinline__ int in_quad() { return threadIdx.x % 4; }

// A quad's four groups of eight columns: lane q brings in x[g] the columns 2 q and 2 q + 1 of group g, as products have
// them, and takes away in x[p] the columns 2 p and 2 p + 1 of group q, which are eight neighbours.
__device__ __forceinline__ void quad_transpose(float (&x)[4][2]) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool upper = in_quad() & bit;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int e = i % 2, g = i / 2;
            if (g & bit) continue;
            const float other = SHUFFLE_XOR(upper ? x[g][e] : x[g | bit][e], bit);
            x[g][e] = upper ? other : x[g][e];
            x[g | bit][e] = upper ? x[g | bit][e] : other;
        }
    }
}

#if defined(HOST_BUILD) || defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

// Copies of 16 bytes from global to shared memory that go on while the thread does: "cp.async", "cp.async.commit_group"
// and "cp.async.wait_group". The host build makes them when they are waited for, the last ones first, since their order
// is not set; until then NaN lies there.
class Copies {
#if defined(HOST_BUILD)
    static const int MOST = 512;
    struct {
        void *there;
        const void *from;
        int bytes, group;
    } copies[MOST];
    int begin = 0, end = 0, group = 0;

    static void write(void *there, const void *from, int bytes, unsigned char rest) {
        Vector<unsigned char, 16> chunk;
        if (bytes == 16) chunk = *(const Vector<unsigned char, 16> *)from;
        else
            for (int i = 0; i < 16; i++) chunk.of[i] = i < bytes ? ((const unsigned char *)from)[i] : rest;
        *(Vector<unsigned char, 16> *)there = chunk;
    }
#endif

public:
    // The first `bytes`, 0 to 16, and zeros after them; beyond them nothing is read. `from` stays what it is, but the
    // compiler is not told: it would reckon the addresses of a row of copies all at once, for which no registers are.
    template <typename U>
    __device__ __forceinline__ void add(void *there, const U *&from, int bytes) {
#if defined(HOST_BUILD)
        write(there, nullptr, 0, 0xff);
        copies[end++ % MOST] = {there, from, bytes, group};
#else
        asm volatile("cp.async.cg.shared.global.L2::128B [%1], [%0], 16, %2;"
                     : "+l"(from)
                     : "r"((unsigned)__cvta_generic_to_shared(there)), "r"(bytes)
                     : "memory");
#endif
    }

    // Those since the last call are a group.
    __device__ __forceinline__ void commit() {
#if defined(HOST_BUILD)
        group++;
#else
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }

    // Waits until of this thread's groups the last LEFT, at most, have not arrived.
    template <int LEFT>
    __device__ __forceinline__ void wait() {
#if defined(HOST_BUILD)
        int last = begin;
        while (last < end && copies[last % MOST].group + LEFT < group) last++;
        for (int i = last; i-- > begin;) {
            const auto &copy = copies[i % MOST];
            write(copy.there, copy.from, copy.bytes, 0);
        }
        begin = last;
#else
        asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
    }
};

#if defined(HOST_BUILD)
struct Rows {
    Vector<unsigned, 4> row;
    unsigned x[4];
};

template <bool TRANSPOSED>
UNSEEN void hand_out(void **arrived, host::Lanes) {
    for (int i = 0; i < 128; i++) {
        const int lane = i / 4, matrix = i % 4;
        unsigned &x = ((Rows *)arrived[lane])->x[matrix];
        x = 0;
        for (int j = 0; j < 2; j++) {
            const int row = TRANSPOSED ? lane % 4 * 2 + j : lane / 4, column = TRANSPOSED ? lane / 4 : lane % 4 * 2 + j;
            const unsigned pair = ((Rows *)arrived[matrix * 8 + row])->row.of[column / 2];
            x |= (pair >> column % 2 * 16 & 0xffff) << j * 16;
        }
    }
}
#endif

// Four 8 x 8 matrices of 16-bit elements from shared memory: lane i gives the address of row i % 8 of matrix i / 8. Of
// each a lane gets, in row quad(), the elements 2 in_quad() and the next; TRANSPOSED, in column quad(). "ldmatrix".
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(unsigned (&x)[4], const void *row) {
#if defined(HOST_BUILD)
    Rows mine = {*(const Vector<unsigned, 4> *)row, {}};
    host::collective(host::ALL_LANES, hand_out<TRANSPOSED>, &mine, __LINE__);
    for (int i = 0; i < 4; i++) x[i] = mine.x[i];
#else
    const unsigned address = (unsigned)__cvta_generic_to_shared(row);
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(address)
                     : "memory");
#endif
}

// A word of a fragment as products want it: a float is rounded to tf32, which has 11 bits. Section "cvt".
template <typename U>
__device__ __forceinline__ unsigned rounded(unsigned x) {
    return x;
}

template <>
__device__ __forceinline__ unsigned rounded<float>(unsigned x) {
#if defined(HOST_BUILD)
    return (x & 0x7f800000u) == 0x7f800000u ? x : (x + 0x1000u) & ~0x1fffu;
#else
    unsigned y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(__uint_as_float(x)));
    return y;
#endif
}

// A word of ones.
template <typename U>
__device__ __forceinline__ unsigned ones();

template <>
__device__ __forceinline__ unsigned ones<float>() {
    return 0x3f800000u;
}

template <>
__device__ __forceinline__ unsigned ones<float16>() {
    return 0x3c003c00u;
}

template <>
__device__ __forceinline__ unsigned ones<bfloat16>() {
    return 0x3f803f80u;
}

// c += a b for fragments of a and b. Of c a lane has, in row quad(), the columns 2 in_quad() and the next; then those
// of row quad() + 8. Sections "Matrix Fragments for mma.m16n8k16 with floating point type" and "… for mma.m16n8k8".
template <typename U>
__device__ __forceinline__ void add_product(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

#if defined(HOST_BUILD)
struct Factors {
    float c[4];
    unsigned a[4], b[2];
};

template <typename U>
UNSEEN float element(unsigned word, int i) {
    if (sizeof(U) == 4) return __uint_as_float(word & ~0x1fffu);
    const unsigned half = word >> i * 16 & 0xffff;
    return std::is_same<U, float16>::value ? host::from_half(half) : __uint_as_float(half << 16);
}

template <typename U>
UNSEEN void add_products(void **arrived, host::Lanes) {
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 8; column++) {
            float &c = ((Factors *)arrived[row % 8 * 4 + column / 2])->c[row / 8 * 2 + column % 2];
            for (int word = 0; word < 8; word++) {
                const unsigned a = ((Factors *)arrived[row % 8 * 4 + word % 4])->a[row / 8 + word / 4 * 2];
                const unsigned b = ((Factors *)arrived[column * 4 + word % 4])->b[word / 4];
                for (int i = 0; i < 4 / (int)sizeof(U); i++) c += element<U>(a, i) * element<U>(b, i);
            }
        }
}

template <typename U>
void add_product(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    Factors mine = {{c[0], c[1], c[2], c[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    host::collective(host::ALL_LANES, add_products<U>, &mine, __LINE__);
    for (int i = 0; i < 4; i++) c[i] = mine.c[i];
}
#else
#define ADD_PRODUCT(U, SHAPE_AND_TYPES)                                                                             \
    template <>                                                                                                     \
    __device__ __forceinline__ void add_product<U>(float(&c)[4], const unsigned(&a)[4], unsigned b0, unsigned b1) { \
        asm("mma.sync.aligned." SHAPE_AND_TYPES " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"  \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                        \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                        \
    }
ADD_PRODUCT(float, "m16n8k8.row.col.f32.tf32.tf32.f32")
ADD_PRODUCT(float16, "m16n8k16.row.col.f32.f16.f16.f32")
ADD_PRODUCT(bfloat16, "m16n8k16.row.col.f32.bf16.bf16.f32")
#endif

#endif
