// Codes of a weight row in checkpoint layout, expanded in registers to exact FP16 (NVFP4) or BF16 (MXFP8) pairs.
//
// A thread holds 16 contiguous bytes of a row: 32 elements in NVFP4, 16 in MXFP8. expand_eight gives the pairs (i, i + 4), i = 0..3,
// of eight of them: what two tensor-core products take (order.cuh).
#pragma once

#if NVFP4
// Operands are FP16: an E2M1 value times an E4M3 scale is a multiple of 2^-10 up to 2688, which FP16 holds exactly.
// Expanded values are 2^-7 times that; the epilogue multiplies by UNFOLD, which is exact too.
constexpr float UNFOLD = 128.0f;
constexpr int EIGHTS = 4, SCALE_BLOCK = 16, SCALES_PER_RUN = 2;
constexpr size_t ROW_BYTES = K / 2, SCALE_BYTES = K / 16;
constexpr size_t STEP_SCALES = 8;  // bytes
typedef u16 RunScales;             // of the two blocks in a run
DEVICE size_t first_scale(int t) { return 2 * t; }
DEVICE int scale_of_eight(int q) { return q / 2; }

DEVICE u32 multiply_pairs(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
// Pairs (s * 2^7, s * 2^7) of the block scales of a run.
DEVICE void multipliers(u32 scales, u32* times) {
    u32 both;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"((u16)scales));
    both = multiply_pairs(both, 0x58005800u);
    times[0] = __byte_perm(both, 0, 0x1010);
    times[1] = __byte_perm(both, 0, 0x3232);
}
DEVICE float low_value(u32 pair) {
    float v;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(v) : "r"(pair));
    return v;
}
DEVICE float high_value(u32 pair) { return low_value(pair >> 16); }

// Three magnitude bits of E2M1 at bits 9 to 11 of an FP16 number and the sign at bit 15 are the value times 2^-14, subnormals too.
// Four codes at a time become the high bytes of such numbers; the low bytes are zero.
DEVICE void expand_eight(const u32* words, int q, u32 times, u32* pairs) {
    const u32 w = words[q], sign = 0x80808080u, magnitude = 0x0E0E0E0Eu;
    const u32 even = ((w << 4) & sign) | ((w << 1) & magnitude), odd = (w & sign) | ((w >> 3) & magnitude);
    pairs[0] = multiply_pairs(__byte_perm(even, 0u, 0x2404u), times);
    pairs[1] = multiply_pairs(__byte_perm(odd, 0u, 0x2404u), times);
    pairs[2] = multiply_pairs(even & 0xFF00FF00u, times);
    pairs[3] = multiply_pairs(odd & 0xFF00FF00u, times);
}
#else
// Operands are BF16, whose exponent has the range of E8M0.
constexpr float UNFOLD = 1.0f;
constexpr int EIGHTS = 2, SCALE_BLOCK = 32, SCALES_PER_RUN = 1;
constexpr size_t ROW_BYTES = K, SCALE_BYTES = K / 32;
constexpr size_t STEP_SCALES = 2;
typedef u8 RunScales;  // half a block is a run
DEVICE size_t first_scale(int t) { return t / 2; }
DEVICE int scale_of_eight(int) { return 0; }

DEVICE u32 multiply_pairs(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
DEVICE void multipliers(u32 e, u32* times) {
    const u32 half = e == 0u ? 0x0040u : e == 255u ? 0x7FC0u : e << 7;
    times[0] = half | half << 16;
}
DEVICE float low_value(u32 pair) { return low(pair); }
DEVICE float high_value(u32 pair) { return high(pair); }

// E4M3 bits under BF16's exponent are the value times 2^-120; two products, since one factor can be out of range.
DEVICE void expand_eight(const u32* words, int q, u32 times, u32* pairs) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 both = __byte_perm(words[2 * q], words[2 * q + 1], 0x4000u | i << 4 | i << 12) & 0xFF00FF00u;
        u32 tiny = (both & 0x80008000u) | ((both >> 4) & 0x07F007F0u);
        pairs[i] = multiply_pairs(multiply_pairs(tiny, 0x7B807B80u), times);
    }
}
#endif
