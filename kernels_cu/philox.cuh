// Philox4x32-10: the random words of tinygrad_gpu/random.py, drawn where a kernel needs them.
// Source: Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3 (SC 2011)
#pragma once
#include "common.cuh"

// The four words of the counter (block, draw) under the key `seed`. Element i of a row that starts with the counter
// `first` has the word i % 4 of the block first + i / 4.
__device__ __forceinline__ Vector<unsigned, 4> philox(unsigned long long block, unsigned long long draw,
                                                      unsigned long long seed) {
    unsigned c0 = (unsigned)block, c1 = (unsigned)(block >> 32), c2 = (unsigned)draw, c3 = (unsigned)(draw >> 32);
    unsigned k0 = (unsigned)seed, k1 = (unsigned)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        unsigned long long p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
        c0 = (unsigned)(p1 >> 32) ^ c1 ^ k0;
        c1 = (unsigned)p1;
        c2 = (unsigned)(p0 >> 32) ^ c3 ^ k1;
        c3 = (unsigned)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}
