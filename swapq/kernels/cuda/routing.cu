// Slots (token * top_k + j) sorted by expert, and the tiles of at most TOKENS slots that the grouped kernel takes. One block.
//
// -D EXPERTS, TOKENS, THREADS
// local_of: local id of each of `known` global ids, or null.
// tiles: [0] their number, then (expert, first position in `slots`, slots) each.
#include "contract.cuh"
#include "dependent.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) routing(
    const void* __restrict__ ids, int wide, const int* __restrict__ local_of, int known, int count,
    int* __restrict__ slots, int* __restrict__ tiles) {
    wait_for_previous();
    let_next_start();
    __shared__ int size[EXPERTS], start[EXPERTS + 1], tile[EXPERTS + 1];
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) size[e] = 0;
    __syncthreads();
    auto expert_of = [&](int i) {
        long long id = wide ? ((const long long*)ids)[i] : ((const int*)ids)[i];
        if (local_of) id = id < 0 || id >= known ? -1 : local_of[id];
        return id < 0 || id >= EXPERTS ? -1 : (int)id;
    };
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const int e = expert_of(i);
        if (e >= 0) atomicAdd(&size[e], 1);
    }
    __syncthreads();
    if (threadIdx.x < 32) {  // one warp scans both sums
        int slot_sum = 0, tile_sum = 0;
        for (int base = 0; base < EXPERTS; base += 32) {
            const int e = base + threadIdx.x, n = e < EXPERTS ? size[e] : 0, m = (n + TOKENS - 1) / TOKENS;
            int n_scan = n, m_scan = m;
            for (int step = 1; step < 32; step *= 2) {
                const int n_up = __shfl_up_sync(0xFFFFFFFFu, n_scan, step), m_up = __shfl_up_sync(0xFFFFFFFFu, m_scan, step);
                if (threadIdx.x >= step) n_scan += n_up, m_scan += m_up;
            }
            if (e < EXPERTS) start[e] = slot_sum + n_scan - n, tile[e] = tile_sum + m_scan - m;
            slot_sum += __shfl_sync(0xFFFFFFFFu, n_scan, 31);
            tile_sum += __shfl_sync(0xFFFFFFFFu, m_scan, 31);
        }
        if (threadIdx.x == 0) tiles[0] = tile_sum;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS)
        for (int i = 0, at = tile[e]; i < size[e]; i += TOKENS, at++) {
            tiles[1 + 3 * at] = e;
            tiles[2 + 3 * at] = start[e] + i;
            tiles[3 + 3 * at] = min(TOKENS, size[e] - i);
        }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const int e = expert_of(i);
        if (e >= 0) slots[atomicAdd(&start[e], 1)] = i;  // the order within an expert is free: no row's bits depend on it
    }
}
