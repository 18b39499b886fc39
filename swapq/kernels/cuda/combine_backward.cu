// Gradients of combine.cu: d_rows = bf16(weight * d_out) and d_weight = sum of d_out * row, one block per routed row.
// -D H (even), THREADS
#include "contract.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) combine_backward(
    const u32* __restrict__ rows, const float* __restrict__ weights, const long long* __restrict__ slots, int top_k,
    const u32* __restrict__ d_out, u32* __restrict__ d_rows, float* __restrict__ d_weights) {
    __shared__ float partial[THREADS / 32];
    const size_t row = blockIdx.x, slot = slots[row], token = slot / top_k;
    const float weight = weights[slot];
    float sum = 0.0f;
    for (int at = threadIdx.x; at < H / 2; at += THREADS) {
        const u32 d = d_out[token * (H / 2) + at], y = rows[row * (H / 2) + at];
        d_rows[row * (H / 2) + at] = bf16_pair(__fmul_rn(low(d), weight), __fmul_rn(high(d), weight));
        sum += low(d) * low(y) + high(d) * high(y);
    }
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < THREADS / 32; i++) sum += partial[i];
        d_weights[slot] = sum;
    }
}
