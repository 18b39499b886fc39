// The sums of one tensor. Grid: pieces of four lanes a thread, groups of chunks.
#include "word_sums.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) word_sums(
    const u32* __restrict__ words, int whole, int rest, const u64* __restrict__ lane_keys, const u64* __restrict__ chunk_keys,
    int chunk_stride, u64* __restrict__ into) {
    const int lane = (blockIdx.x * THREADS + threadIdx.x) * 4, first = blockIdx.y * CHUNKS;
    add_block(words, whole, rest, lane, first, lane_keys, chunk_keys, chunk_stride, into);
}
