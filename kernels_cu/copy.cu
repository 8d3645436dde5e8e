// copy: y = x, element by element, between any two memory layouts
// Shapes    y, x (n0, n1, n2, n3, n4) T of any strides, n elements; n0 follows from n
// Launch    a thread for VEC elements: grid ceil(n / (VEC * blockDim)); block 256; no shared memory
// Memory    reads x, writes y: 2 n sizeof(T) bytes, in whole sectors where both move along the last axis
// Numerics  exact
// Requires  VEC > 1: n4 and the strides but the last multiples of VEC, the last 1, pointers multiples of VEC elements
// Source    none
// Measured  NVIDIA H200, 2026-11-29, commit 14d502b: bfloat16, queries out of (32, 1024, 3, 12, 64): 32 us, 75 % of the
//           copy ceiling
#include "common.cuh"

// Index is 64-bit only where it must be: the divisions of 64-bit numbers take several times as long.
template <typename Index>
__device__ __forceinline__ void move(Strided<T> y, Strided<const T> x, Index i, Index n1, Index n2, Index n3,
                                     Index n4) {
    const Index sizes[4] = {n4, n3, n2, n1};
    long long to = 0, from = 0;
#pragma unroll
    for (int axis = 4; axis > 0; axis--) {
        Index next = i / sizes[4 - axis];
        long long at = i - next * sizes[4 - axis];
        to += at * y.strides[axis], from += at * x.strides[axis];
        i = next;
    }
    to += i * y.strides[0], from += i * x.strides[0];
    *(Vector<T, VEC> *)(y.data + to) = *(const Vector<T, VEC> *)(x.data + from);
}

extern "C" __global__ void __launch_bounds__(256)
    copy(Strided<T> y, Strided<const T> x, long long n, int n1, int n2, int n3, int n4) {
    long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * VEC;
    if (i >= n) return;
    if (n >> 32) move<long long>(y, x, i, n1, n2, n3, n4);
    else move<unsigned>(y, x, (unsigned)i, n1, n2, n3, n4);
}
