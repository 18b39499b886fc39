// The sums of many tensors, `into` [count, 2]. Of each the table has the address, the number of words, and the number of groups of chunks
// before its own: none of an empty tensor. Grid: pieces of four lanes a thread in each group of chunks of all tensors.
#include "word_sums.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) word_sums_many(
    const u64* __restrict__ table, int count, const u64* __restrict__ lane_keys, const u64* __restrict__ chunk_keys, int chunk_stride,
    u64* __restrict__ into) {
    constexpr int PIECES = LANE / (4 * THREADS);
    const int group = blockIdx.x / PIECES, piece = blockIdx.x % PIECES;
    int tensor = 0;  // the last with no more groups before it than this block
    for (int end = count; end - tensor > 1;) {
        const int middle = (tensor + end) / 2;
        if (table[3 * middle + 2] <= group) tensor = middle;
        else end = middle;
    }
    const u64 words = table[3 * tensor + 1];
    const int first = (group - (int)table[3 * tensor + 2]) * CHUNKS, whole = words / LANE, rest = words % LANE;
    if (!whole && piece * THREADS * 4 >= rest) return;  // no thread of the block has a word
    const int lane = (piece * THREADS + threadIdx.x) * 4;
    add_block((const u32*)table[3 * tensor], whole, rest, lane, first, lane_keys, chunk_keys, chunk_stride, into + 2 * tensor);
}
