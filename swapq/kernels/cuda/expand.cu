// Stored weights to operand values (FP16 for NVFP4, BF16 for MXFP8) in the tensor core's order, [rows, PADDED_K] (order.cuh).
// -D K, NVFP4, GROUP, THREADS. A thread takes 16 bytes of codes.
#include "contract.cuh"
#include "order.cuh"
#include "weights.cuh"

constexpr int RUNS = PADDED_K / RUN;  // of a row

extern "C" __global__ void __launch_bounds__(THREADS) expand(
    const u8* __restrict__ codes, const u8* __restrict__ scales, int rows, u16* __restrict__ out) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x, row = at / RUNS;
    const int k = (int)(at % RUNS) * RUN;
    if (row >= rows) return;
    u32 words[4] = {}, times[2] = {};
    if (k < K) {  // past the end of a row the operand is zero
        const uint4 v = __ldcs((const uint4*)(codes + row * ROW_BYTES + k / (NVFP4 ? 2 : 1)));
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        multipliers(*(const RunScales*)(scales + row * SCALE_BYTES + k / SCALE_BLOCK), times);
    }
#pragma unroll
    for (int q = 0; q < EIGHTS; q++) {
        u32 pairs[4];
        expand_eight(words, q, times[scale_of_eight(q)], pairs);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (NVFP4) pairs[i] = multiply_pairs(pairs[i], 0x58005800u);  // UNFOLD in both halves
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(uint2*)(out + row * PADDED_K + place_of_eight(k + 8 * q, half)) = make_uint2(pairs[2 * half], pairs[2 * half + 1]);
    }
}
