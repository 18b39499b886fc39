// MXFP8 along the rows of a matrix: blocks of 32 rows by one column (contract section 1, column-wise).
// -D K (columns, even), THREADS
//    OPERAND      1: write the exact BF16 values, [M, K]; 0: codes [M, K] and scales [ceil(M / 32), K]
// Grid: column pairs, blocks of rows, matrices. A thread takes two columns.
#include "contract.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) quantize_columns(
    const u32* __restrict__ x, int rows, void* __restrict__ out, u16* __restrict__ scales) {
    const int pair = blockIdx.x * THREADS + threadIdx.x;
    if (pair >= K / 2) return;
    const int first = blockIdx.y * 32, count = min(32, rows - first);
    const size_t base = ((size_t)blockIdx.z * rows + first) * (K / 2) + pair;
    u32 held[32], top = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        held[i] = i < count ? x[base + (size_t)i * (K / 2)] : 0u;
        top = max_magnitude(top, held[i]);
    }
    const u32 even = e8m0_code(magnitude_value(top & 0xFFFFu)), odd = e8m0_code(magnitude_value(top >> 16));
    const float even_factor = e8m0_inverse(even), odd_factor = e8m0_inverse(odd);
#if OPERAND
    const float even_scale = e8m0_value(even), odd_scale = e8m0_value(odd);
#else
    scales[((size_t)blockIdx.z * gridDim.y + blockIdx.y) * (K / 2) + pair] = (u16)(even | odd << 8);
#endif
#pragma unroll
    for (int i = 0; i < 32; i++) {
        if (i >= count) break;
        const u32 codes = e4m3_pair(__fmul_rn(low(held[i]), even_factor), __fmul_rn(high(held[i]), odd_factor));
#if OPERAND
        ((u32*)out)[base + (size_t)i * (K / 2)] =
            bf16_pair(__fmul_rn(e4m3_value(codes & 0xFFu), even_scale), __fmul_rn(e4m3_value(codes >> 8), odd_scale));
#else
        ((u16*)out)[base + (size_t)i * (K / 2)] = (u16)codes;
#endif
    }
}
