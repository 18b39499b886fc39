// h = bf16(table[gate]) * up and its gradient, for rows [R, 2I] that hold gate and up (contract section 4).
// -D I (even), THREADS, BACKWARD. The table holds bf16(act(v)) of every BF16 v; `slopes` act'(v) in float32.
// Backward is autograd's of the two BF16 operations: d_up = bf16(dh * a), d_gate = bf16(bf16(dh * up) * slope).
#include "contract.cuh"

DEVICE float looked_up(const u16* table, u32 bits) { return magnitude_value(table[bits ^ 0x8000u]); }

extern "C" __global__ void __launch_bounds__(THREADS) swiglu(
    const u32* __restrict__ rows, const u16* __restrict__ table, const float* __restrict__ slopes, const u32* __restrict__ dh,
    int count, u32* __restrict__ out) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x, row = at / (I / 2);
    if (row >= count) return;
    const long long gate_at = row * I + at % (I / 2), up_at = gate_at + I / 2;
    const u32 gate = rows[gate_at], up = rows[up_at];
    const float a = looked_up(table, gate & 0xFFFFu), b = looked_up(table, gate >> 16);
#if BACKWARD
    const u32 d = dh[at];
    const u32 da = bf16_pair(__fmul_rn(low(d), low(up)), __fmul_rn(high(d), high(up)));
    const float even = slopes[(gate & 0xFFFFu) ^ 0x8000u], odd = slopes[(gate >> 16) ^ 0x8000u];
    out[gate_at] = bf16_pair(__fmul_rn(low(da), even), __fmul_rn(high(da), odd));
    out[up_at] = bf16_pair(__fmul_rn(low(d), a), __fmul_rn(high(d), b));
#else
    out[at] = bf16_pair(__fmul_rn(a, low(up)), __fmul_rn(b, high(up)));
#endif
}
