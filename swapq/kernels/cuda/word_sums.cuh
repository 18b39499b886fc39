// The two sums of a digest (kernels/word_sums.py): words times the keys of their lane and chunk, modulo 2^64.
// -D THREADS, LANE (words in a chunk), CHUNKS (chunks that a block adds up).
#pragma once
#include "contract.cuh"

DEVICE void add(u64* sums, u32 word, u64 first, u64 second) {
    const u64 wide = (u64)(long long)(int)word;  // words are signed
    sums[0] += wide * first;
    sums[1] += wide * second;
}

// A block's part: lanes lane to lane + 3 of each thread, in chunks first to first + CHUNKS - 1 of `whole` and one of `rest` words.
// A lane's keys multiply once, after its chunks are added under theirs.
DEVICE void add_block(
    const u32* __restrict__ words, int whole, int rest, int lane, int first, const u64* __restrict__ lane_keys,
    const u64* __restrict__ chunk_keys, int chunk_stride, u64* __restrict__ into) {
    u64 sums[4][2] = {};
#pragma unroll 4
    for (int i = 0; i < CHUNKS; i++) {
        const int chunk = first + i;
        if (chunk >= whole) break;
        const uint4 v = *(const uint4*)(words + (size_t)chunk * LANE + lane);
        const u64 a = chunk_keys[chunk], b = chunk_keys[chunk_stride + chunk];
        add(sums[0], v.x, a, b), add(sums[1], v.y, a, b), add(sums[2], v.z, a, b), add(sums[3], v.w, a, b);
    }
    if (rest && first <= whole && whole < first + CHUNKS) {  // the last chunk, which is not full
        const u64 a = chunk_keys[whole], b = chunk_keys[chunk_stride + whole];
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (lane + i < rest) add(sums[i], words[(size_t)whole * LANE + lane + i], a, b);
    }
    u64 total[2] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        total[0] += sums[i][0] * lane_keys[lane + i];
        total[1] += sums[i][1] * lane_keys[LANE + lane + i];
    }
#pragma unroll
    for (int step = 16; step; step /= 2) {
        total[0] += __shfl_down_sync(0xFFFFFFFFu, total[0], step);
        total[1] += __shfl_down_sync(0xFFFFFFFFu, total[1], step);
    }
    if (threadIdx.x % 32 == 0) {
        atomicAdd(&into[0], total[0]);
        atomicAdd(&into[1], total[1]);
    }
}
