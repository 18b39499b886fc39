// Rows of a BF16 matrix to codes and scales, or to the exact operand of the GEMM: FP16 for NVFP4 and FP8 block, BF16 for MXFP8 (contract
// sections 1 to 3 and 7).
// A row belongs to LANES lanes of one warp; each takes 16 elements at a time and keeps them in registers between the two passes.
//
// -D K           elements of a row
//    LANES       lanes that share a row: 8, 16 or 32
//    FORMAT      NVFP4_ROW: one FP32 scale per row, computed here; NVFP4_TENSOR: the scopes' scales S and G are given; MXFP8; FP8_BLOCK: one
//                FP32 scale per 128 elements, the last of which may be fewer
//    OPERAND     1: write exact values instead of codes and scales, in the order of the tensor core (see order.cuh); FP8_BLOCK in their own
//    BESIDE      1: runs beside the kernel before it, with which it shares nothing, and waits for it at the end (dependent.cuh)
//    GATED       1: x holds the halves gate and up of SwiGLU, [rows, 2K]; quantize bf16(table[gate]) * up
#include "contract.cuh"
#include "order.cuh"
#include "blocks.cuh"
#include "dependent.cuh"

#define NVFP4_ROW 0
#define NVFP4_TENSOR 1
#define MXFP8 2
#define FP8_BLOCK 3

constexpr int BLOCKS = K / 16, PER_LANE = (BLOCKS + LANES - 1) / LANES;
constexpr int LONG = (K + 127) / 128;  // scales of a row of FP8_BLOCK
constexpr bool WHOLE = BLOCKS % LANES == 0, HOLD = PER_LANE <= 16;

// h = bf16(f32(bf16(act(gate))) * f32(up)): contract section 4. The table holds bf16(act(v)) of every BF16 v.
DEVICE Block gated(const Block& gate, const Block& up, const u16* table) {
    Block h;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float even = magnitude_value(table[(gate.pair[i] & 0xFFFFu) ^ 0x8000u]);
        float odd = magnitude_value(table[(gate.pair[i] >> 16) ^ 0x8000u]);
        h.pair[i] = bf16_pair(__fmul_rn(even, low(up.pair[i])), __fmul_rn(odd, high(up.pair[i])));
    }
    return h;
}

DEVICE Block fetch(const u16* x, size_t row, int block, const u16* table) {
#if GATED
    const u16* gate = x + row * (2 * K) + block * 16;
    return gated(load(gate), load(gate + K), table);
#else
    return load(x + row * K + block * 16);
#endif
}

DEVICE void scaled(const Block& x, float factor, float* y) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        y[2 * i] = __fmul_rn(low(x.pair[i]), factor);
        y[2 * i + 1] = __fmul_rn(high(x.pair[i]), factor);
    }
}

// Two exact values as the operand holds them.
DEVICE u32 as_pair(float a, float b) { return FORMAT == MXFP8 ? bf16_pair(a, b) : fp16_pair(a, b); }

extern "C" __global__ void __launch_bounds__(THREADS) quantize_rows(
    const u16* __restrict__ x, const u16* __restrict__ table, const float* __restrict__ encode, const float* __restrict__ decode,
    int rows_per_scope, int rows,
    void* __restrict__ codes, u8* __restrict__ scales, float* __restrict__ row_scale) {
    if (!BESIDE) {
        wait_for_previous();
        let_next_start();
    }
    const int lane = threadIdx.x % LANES;
    const size_t row = (size_t)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    const bool here = row < rows;
    const size_t at = here ? row : 0;  // lanes without a row stay for the shuffles
    Block held[HOLD ? PER_LANE : 1];
    GlobalScale scale;
#if FORMAT == NVFP4_ROW
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int block = lane + i * LANES;
        if (WHOLE || block < BLOCKS) {
            Block b = fetch(x, at, block, table);
            if (HOLD) held[i] = b;
#pragma unroll
            for (int j = 0; j < 8; j++) top = max_magnitude(top, b.pair[j]);
        }
    }
    top = fold_magnitude(top);
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) top = max(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
    scale = global_scale(magnitude_value(top));
    if (lane == 0 && here) row_scale[row] = scale.decode;
#elif FORMAT == NVFP4_TENSOR
    scale.encode = encode[(int)at / rows_per_scope];
    scale.decode = decode[(int)at / rows_per_scope];
#endif
#if FORMAT == NVFP4_ROW || FORMAT == NVFP4_TENSOR
    const float mult = __fmul_rn(scale.encode, as_float(0x3E2AAAABu));
#endif
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int block = lane + i * LANES;
        const bool mine = WHOLE || block < BLOCKS;
        Block b = {};
        if (FORMAT == NVFP4_ROW && HOLD) {
            if (mine) b = held[i];
        } else if (mine) {
            b = fetch(x, at, block, table);
        }
        u32 top_of_block = block_amax(b);
        float y[16];
#if FORMAT == MXFP8
        top_of_block = max(top_of_block, __shfl_xor_sync(0xFFFFFFFFu, top_of_block, 1));  // a block is two lanes
        const u32 e = e8m0_code(magnitude_value(top_of_block));
        scaled(b, e8m0_inverse(e), y);
        if (!mine || !here) continue;
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 4; j++) words[j] = e4m3_word(y + 4 * j);
#if OPERAND
        float v[16];
#pragma unroll
        for (int j = 0; j < 16; j++) v[j] = __fmul_rn(e4m3_value(words[j / 4] >> (8 * (j % 4)) & 0xFFu), e8m0_value(e));
        store_eight((u16*)codes + row * PADDED_K, block * 16, v, as_pair);
        store_eight((u16*)codes + row * PADDED_K, block * 16 + 8, v + 8, as_pair);
#else
        ((uint4*)codes)[row * BLOCKS + block] = make_uint4(words[0], words[1], words[2], words[3]);
        if (lane % 2 == 0) scales[row * (BLOCKS / 2) + block / 2] = (u8)e;
#endif
#elif FORMAT == FP8_BLOCK
#pragma unroll
        for (int step = 4; step; step /= 2)  // a block is eight lanes
            top_of_block = max(top_of_block, __shfl_xor_sync(0xFFFFFFFFu, top_of_block, step));
        const float s = fp8_block_scale(magnitude_value(top_of_block));
        scaled(b, __fdiv_rn(1.0f, s), y);
        if (!mine || !here) continue;
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 4; j++) words[j] = e4m3_word(y + 4 * j);
        if (block % 8 == 0) row_scale[row * LONG + block / 8] = s;
#if OPERAND
        u32 pairs[8];
#pragma unroll
        for (int j = 0; j < 8; j++) pairs[j] = e4m3_halves(words[j / 2] >> (16 * (j % 2)));
        uint4* to = (uint4*)((u16*)codes + row * K + block * 16);
        to[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        to[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
#else
        ((uint4*)codes)[row * BLOCKS + block] = make_uint4(words[0], words[1], words[2], words[3]);
#endif
#else
        const u32 s = block_scale_code(magnitude_value(top_of_block), mult) & 0xFFu;
        const float value = e4m3_value(s);
        const float factor = block_factor(value, scale.decode);
        if (!mine || !here) continue;
#if OPERAND
        float v[16];
        scaled(b, factor, y);
#pragma unroll
        for (int j = 0; j < 16; j++) v[j] = with_sign_of(__fmul_rn(e2m1_magnitude_value(y[j]), value), y[j]);
        store_eight((u16*)codes + row * PADDED_K, block * 16, v, as_pair);
        store_eight((u16*)codes + row * PADDED_K, block * 16 + 8, v + 8, as_pair);
#else
        ((uint2*)codes)[row * BLOCKS + block] = make_uint2(e2m1_word(b.pair, factor), e2m1_word(b.pair + 4, factor));
        scales[row * BLOCKS + block] = (u8)s;
#endif
#endif
    }
#if OPERAND && FORMAT != FP8_BLOCK
    // What lies between K and the next whole group of the order is zero: it adds nothing to a sum.
    if (here)
        for (int k8 = K / 8 + lane; k8 < PADDED_K / 8; k8 += LANES) store_zeros((u16*)codes + row * PADDED_K, k8 * 8);
#endif
    if (BESIDE) {
        wait_for_previous();
        let_next_start();
    }
}
