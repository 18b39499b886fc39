// Stored weights expanded in memory: exact operand values (FP16 for NVFP4, BF16 for MXFP8) in the tensor core's order, or dequantized values in their own.
//
// -D K, NVFP4, GROUP, THREADS
//    DEQUANTIZED  1: bf16(dequantize), natural order, [rows, K]; 0: operand values, [rows, PADDED_K] in the order of order.cuh
// A thread takes 16 bytes of codes.
#include "contract.cuh"
#include "order.cuh"
#include "weights.cuh"

constexpr int RUNS = PADDED_K / RUN;  // of a row
constexpr u32 UNFOLD_PAIR = 0x58005800u;  // UNFOLD in both halves

extern "C" __global__ void __launch_bounds__(THREADS) expand(
    const u8* __restrict__ codes, const u8* __restrict__ scales, const float* __restrict__ w_scale, int w_scale_stride,
    int rows_per_scale, int rows, u16* __restrict__ out) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    const long long row = at / RUNS;
    const int k = (int)(at % RUNS) * RUN;
    if (row >= rows) return;
    u32 words[4] = {};
    u32 block_scales[2] = {};
    if (k < K) {
        const uint4 v = __ldcs((const uint4*)(codes + row * ROW_BYTES + k / (NVFP4 ? 2 : 1)));
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        const u32 both = *(const RunScales*)(scales + row * SCALE_BYTES + k / SCALE_BLOCK);
        multipliers(both, block_scales);
    } else if (DEQUANTIZED) {
        return;
    }
#if DEQUANTIZED
    const float global = w_scale ? w_scale[row / rows_per_scale * w_scale_stride] : 1.0f;
#endif
#pragma unroll
    for (int q = 0; q < EIGHTS; q++) {
        u32 pairs[4];
        expand_eight(words, q, block_scales[scale_of_eight(q)], pairs);
        if (NVFP4)
            for (int i = 0; i < 4; i++) pairs[i] = multiply_pairs(pairs[i], UNFOLD_PAIR);
#if DEQUANTIZED
        float v[8];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = __fmul_rn(low_value(pairs[i]), global), v[i + 4] = __fmul_rn(high_value(pairs[i]), global);
        *(uint4*)(out + row * K + k + 8 * q) =
            make_uint4(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7]));
#else
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(uint2*)(out + row * PADDED_K + place_of_eight(k + 8 * q, half)) = make_uint2(pairs[2 * half], pairs[2 * half + 1]);
#endif
    }
}
