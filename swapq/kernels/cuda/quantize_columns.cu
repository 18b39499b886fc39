// MXFP8 along the rows of a matrix: blocks of at most 32 rows by one column (contract section 1, column-wise), and the way back.
//
// -D K            columns, even
//    MODE         0: codes [M, K] and scales [blocks, K] of x; 1: the exact BF16 values [M, K] of x; 2: those of stored codes and scales
//    THREADS
// Grid: for each block of rows its column pairs, in one axis: a weight of many experts has more than 65535 blocks. `starts` has the first
// row of each block and, last, the end: a block never crosses a group's edge, as if each group were padded with zero rows. A thread takes
// two columns.
#include "contract.cuh"

constexpr int PIECES = (K / 2 + THREADS - 1) / THREADS;  // of a row

extern "C" __global__ void __launch_bounds__(THREADS) quantize_columns(
    const u32* __restrict__ x, const int* __restrict__ starts, u16* __restrict__ codes, u16* __restrict__ scales, u32* __restrict__ values) {
    const int block = blockIdx.x / PIECES, pair = blockIdx.x % PIECES * THREADS + threadIdx.x;
    if (pair >= K / 2) return;
    const int first = starts[block], count = starts[block + 1] - first;
    const size_t base = (size_t)first * (K / 2) + pair, scale_at = (size_t)block * (K / 2) + pair;
#if MODE == 2
    const u32 both = scales[scale_at], even = both & 0xFFu, odd = both >> 8;
#else
    u32 held[32], top = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        held[i] = i < count ? x[base + (size_t)i * (K / 2)] : 0u;
        top = max_magnitude(top, held[i]);
    }
    const u32 even = e8m0_code(magnitude_value(top & 0xFFFFu)), odd = e8m0_code(magnitude_value(top >> 16));
    const float even_factor = e8m0_inverse(even), odd_factor = e8m0_inverse(odd);
#endif
#if MODE == 0
    scales[scale_at] = (u16)(even | odd << 8);
#else
    const float even_scale = e8m0_value(even), odd_scale = e8m0_value(odd);
#endif
#pragma unroll
    for (int i = 0; i < 32; i++) {
        if (i >= count) break;
        const size_t at = base + (size_t)i * (K / 2);
#if MODE == 2
        const u32 pair_codes = codes[at];
#else
        const u32 pair_codes = e4m3_pair(__fmul_rn(low(held[i]), even_factor), __fmul_rn(high(held[i]), odd_factor));
#endif
#if MODE == 0
        codes[at] = (u16)pair_codes;
#else
        values[at] = bf16_pair(__fmul_rn(e4m3_value(pair_codes & 0xFFu), even_scale), __fmul_rn(e4m3_value(pair_codes >> 8), odd_scale));
#endif
    }
}
