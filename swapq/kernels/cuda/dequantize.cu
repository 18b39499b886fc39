// bf16(dequantize) of stored weights or rows, [rows, K] (contract sections 1 and 2).
// -D K, NVFP4, GROUP, THREADS
//    SCOPE_ROWS   rows that share one FP32 scale (NVFP4): 1, or the rows of a matrix
// A thread takes eight elements.
#include "contract.cuh"
#include "order.cuh"
#include "weights.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) dequantize(
    const u8* __restrict__ codes, const u8* __restrict__ scales, const float* __restrict__ w_scale, int rows, u16* __restrict__ out) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x, row = at / (K / 8);
    const int k = (int)(at % (K / 8)) * 8;
    if (row >= rows) return;
    u32 words[2] = {}, times[2], pairs[4];
    float v[8];
#if NVFP4
    words[0] = ((const u32*)codes)[at];
    multipliers(scales[row * SCALE_BYTES + k / SCALE_BLOCK], times);
    const float global = w_scale[row / SCOPE_ROWS];
#else
    const uint2 both = ((const uint2*)codes)[at];
    words[0] = both.x, words[1] = both.y;
    multipliers(scales[row * SCALE_BYTES + k / SCALE_BLOCK], times);
    const float global = 1.0f;
#endif
    expand_eight(words, 0, times[0], pairs);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = __fmul_rn(__fmul_rn(low_value(pairs[i]), UNFOLD), global);
        v[i + 4] = __fmul_rn(__fmul_rn(high_value(pairs[i]), UNFOLD), global);
    }
    ((uint4*)out)[at] = make_uint4(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7]));
}
