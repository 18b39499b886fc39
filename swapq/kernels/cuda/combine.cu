// out[token] = bf16(sum over j of weight[token, j] * row of slot (token, j)), float32, ascending j (contract section 4).
// -D H (even), THREADS
// A slot's row is rows[slot], or rows[position[slot]]; a slot that is not here (id outside 0 .. experts - 1, position -1) adds zero.
#include "contract.cuh"
#include "dependent.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) combine(
    const u32* __restrict__ rows, const float* __restrict__ weights, const int* __restrict__ position, const void* __restrict__ ids,
    int wide, const int* __restrict__ local_of, int known, int experts, int top_k, u32* __restrict__ out) {
    wait_for_previous();
    let_next_start();
    const size_t token = blockIdx.x;
    for (int at = threadIdx.x; at < H / 2; at += THREADS) {
        float even = 0.0f, odd = 0.0f;
        for (int j = 0; j < top_k; j++) {
            const size_t slot = token * top_k + j;
            long long row = slot;
            bool here = true;
            if (position) {
                row = position[slot];
                here = row >= 0;
            } else {
                long long id = wide ? ((const long long*)ids)[slot] : ((const int*)ids)[slot];
                if (local_of) id = id < 0 || id >= known ? -1 : local_of[id];
                here = id >= 0 && id < experts;
            }
            // The row of a slot that is not here was never written, and its weight may be anything.
            const u32 pair = here ? rows[row * (H / 2) + at] : 0u;
            const float weight = !here ? 0.0f : weights ? weights[slot] : 1.0f;
            const float a = __fmul_rn(low(pair), weight), b = __fmul_rn(high(pair), weight);
            even = j ? __fadd_rn(even, a) : a;
            odd = j ? __fadd_rn(odd, b) : b;
        }
        out[token * (H / 2) + at] = bf16_pair(even, odd);
    }
}
