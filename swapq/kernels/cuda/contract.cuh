// The numeric contract in device code: each function is one step of contract sections 1, 2 and 7, bit for bit.
// Compiled without contraction of multiply and add (--fmad=false): one IEEE float32 operation a line, subnormals kept.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__

constexpr float F32_MAX = 3.4028234663852886e38f;

DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 as_bits(float value) { return __float_as_uint(value); }

// BF16 pairs: the even element in the low half.
DEVICE float low(u32 pair) { return as_float(pair << 16); }
DEVICE float high(u32 pair) { return as_float(pair & 0xFFFF0000u); }
DEVICE u32 bf16_pair(float even, float odd) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(odd), "f"(even));
    return pair;
}
DEVICE u32 fp16_pair(float even, float odd) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(odd), "f"(even));
    return pair;
}
DEVICE u16 bf16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
// Largest magnitude of both halves; as integers, so that NaN is above Inf and shows.
DEVICE u32 max_magnitude(u32 a, u32 pair) { return __vmaxu2(a, pair & 0x7FFF7FFFu); }
DEVICE u32 fold_magnitude(u32 pair) { return max(pair & 0xFFFFu, pair >> 16); }
DEVICE float magnitude_value(u32 bf16_bits) { return as_float(bf16_bits << 16); }

// min and max of torch: NaN wins.
DEVICE float at_most(float value, float bound) {
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(value), "f"(bound));
    return least;
}
DEVICE float at_least(float value, float bound) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(value), "f"(bound));
    return most;
}

// E4M3, nearest even, saturating at 448; NaN is 0x7F.
DEVICE u32 e4m3_pair(float even, float odd) {
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(odd), "f"(even));
    return codes;
}
DEVICE u32 e4m3_word(const float* y) { return e4m3_pair(y[0], y[1]) | e4m3_pair(y[2], y[3]) << 16; }
DEVICE u32 e4m3_halves(u32 codes) {  // the two low codes as FP16
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)codes));
    return halves;
}
DEVICE float e4m3_value(u32 code) {
    float value;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(value) : "r"(e4m3_halves(code)));
    return value;
}

// NVFP4 (contract section 2).
struct GlobalScale { float encode, decode; };
DEVICE GlobalScale global_scale(float amax) {
    GlobalScale s;
    s.encode = at_most(__fdiv_rn(2688.0f, amax), F32_MAX);
    if (amax == 0.0f) s.encode = 1.0f;
    s.decode = __fdiv_rn(1.0f, s.encode);
    return s;
}
DEVICE u32 block_scale_code(float amax, float mult) { return e4m3_pair(at_most(__fmul_rn(amax, mult), F32_MAX), 0.0f); }
DEVICE float block_factor(float scale, float decode) {
    return at_most(__frcp_rn(__fmul_rn(scale, decode)), F32_MAX);
}

// The E2M1 number nearest to |y|: it is rounded where the last bit of |y| + 2^(22 + e) lies, e = 0, 1, 2 for |y| below 2, 4, 8, which is
// the step of E2M1; the addition rounds to nearest even and the subtraction is exact.
DEVICE float e2m1_magnitude_value(float y) {
    float magnitude = fminf(fabsf(y), 6.0f);
    float magic = as_float(max(as_bits(magnitude) & 0x7F800000u, 0x3F800000u) + (22u << 23));
    return __fsub_rn(__fadd_rn(magnitude, magic), magic);
}
DEVICE float with_sign_of(float magnitude, float y) { return as_float(as_bits(magnitude) | (as_bits(y) & 0x80000000u)); }

// Codes of eight elements in a word, element 0 in the low nibble.
//
// A sum onto 2^23 - 2 rounds y >= 0 once, to nearest even: to steps of 0.5 below 2, and of 1 from there on, where the sum passes 2^23. A
// fused multiply-add of y / 2 onto 2^23 rounds to steps of 2. Bits of floats are consecutive across a power of two, so those of both sums
// count codes, from 0 at 2^23 - 2 and from 4 at 2^23; the lesser is the code. Positive floats compare as integers; NaN is above all and
// becomes 7.
constexpr u32 E2M1_ZERO = 0x4AFFFFFCu;  // bits of 2^23 - 2
DEVICE u32 e2m1_sum(float y) {
    return min(min(as_bits(__fadd_rn(y, 8388606.0f)), as_bits(__fmaf_rn(y, 0.5f, 8388608.0f))), E2M1_ZERO + 7u);
}
DEVICE u32 sign_bytes(u32 a, u32 b) {  // FF where an element of the two pairs is negative, else 00
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, 0xFDB9;" : "=r"(bytes) : "r"(a), "r"(b));
    return bytes;
}
DEVICE u32 e2m1_word(const u32* pairs, float factor) {
    u32 word = 0;
#pragma unroll
    for (int i = 3; i >= 0; i--) {
        word = word * 16u + e2m1_sum(__fmul_rn(fabsf(high(pairs[i])), factor));
        word = word * 16u + e2m1_sum(__fmul_rn(fabsf(low(pairs[i])), factor));
    }
    // Signs of elements 0, 2, 4, 6 in low nibbles and of 1, 3, 5, 7 in high ones; of each nibble one bit is kept.
    const u32 first = sign_bytes(pairs[0], pairs[1]), second = sign_bytes(pairs[2], pairs[3]);
    const u32 even = __byte_perm(first, second, 0x6420u), odd = __byte_perm(first, second, 0x7531u);
    const u32 signs = (even & 0x08080808u) | (odd & 0x80808080u);
    return word + signs - E2M1_ZERO * 0x11111111u;
}

// MXFP8 (contract section 1).
DEVICE u32 e8m0_code(float amax) {
    u32 u = as_bits(__fmul_rn(amax, as_float(0x3B124925u)));
    u32 e = u >> 23, m = u & 0x7FFFFFu;
    if (e == 255u) return m ? 255u : 254u;
    return e + (m > 0 && e != 254u && !(e == 0 && m <= 0x400000u));
}
DEVICE float e8m0_inverse(u32 e) { return as_float(e == 254u ? 0x00400000u : e == 255u ? 0x7FC00000u : (254u - e) << 23); }
DEVICE float e8m0_value(u32 e) { return as_float(e == 0u ? 0x00400000u : e == 255u ? 0x7FC00000u : e << 23); }

// FP8 block (contract section 7).
DEVICE float fp8_block_scale(float amax) { return __fdiv_rn(at_least(amax, 1e-10f), 448.0f); }
