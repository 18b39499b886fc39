// What both products of stored weights share: a thread's weight rows, their codes on the way, the epilogue.
//
// -D K, N         contraction length (a multiple of 32) and output rows of an expert's matrix
//    NVFP4        1: codes [E, N, K/2], scales E4M3 [E, N, K/16], FP32 scale [E]; 0: MXFP8 codes [E, N, K], scales [E, N, K/32]
//    GROUP        elements in one round of the order: 128 for NVFP4, 64 for MXFP8
//    TILES        products side by side at most: 8 tokens each
//    M_TILES      16 weight rows each: 1 or 2
//    WARPS        warps of a block;  BLOCKS: blocks on one multiprocessor at least
//    CHUNK        elements of K in shared memory at a time (a multiple of GROUP * AHEAD, or all of K)
//    AHEAD        blocks of K in flight per warp
//    GATED        1: rows [0, N/2) are gate, [N/2, N) up; the output is bf16(table[gate]) * up, [slots, N/2]
//    SPREAD       1: the activation row of a slot is slot / top_k (tokens); 0: the slot itself
#pragma once

constexpr int TOKENS = 8 * TILES, STEPS = PADDED_K / GROUP, CHUNK_STEPS = CHUNK / GROUP;
constexpr int OUT = GATED ? N / 2 : N, ROWS = GATED ? 8 : 16;  // output rows of a tile of 16 weight rows
constexpr int SECOND = GATED ? OUT : 8;                        // from a thread's first weight row of a tile to its second

// 16 bytes that are read once; the level-2 cache fetches whole lines.
DEVICE uint4 stream(const u8* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

// Block scales of the block's weight rows wait in shared memory too.
constexpr int HELD_ROWS = 16 * M_TILES * WARPS, SCALE_CHUNK = CHUNK / SCALE_BLOCK, SCALE_STRIDE = SCALE_CHUNK + 16;
constexpr bool SCALES_IN_UNITS = SCALE_BYTES % 16 == 0 && SCALE_CHUNK % 16 == 0;  // of 16 bytes, which copies take

struct Step { uint4 codes[M_TILES][2]; };

// What a block works on: a tile is an expert, its first position in slots, and its tokens. Without a table one expert takes every row in its place.
struct Arguments {
    const u16* x; const float* x_scale; const u8* codes; const u8* scales; const float* w_scale; int w_scale_stride;
    const float* bias; const u16* table; const int* slots; int first, expert, count, top_k; u16* y;
    __device__ __forceinline__ int slot(int i) const { return slots ? slots[first + i] : first + i; }
};

// Where a thread's codes and scales lie: weight rows g and SECOND further of each tile of its warp.
struct Rows {
    int first[M_TILES];  // weight row in the expert's matrix
    const u8* codes[M_TILES][2];
    int scales[M_TILES][2];  // in shared memory
    int base;                // first output row of the warp

    __device__ __forceinline__ Rows(const Arguments& a) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        base = (blockIdx.x * WARPS + warp) * (ROWS * M_TILES);
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            first[m] = (base + ROWS * m < OUT ? base + ROWS * m : 0) + g;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const size_t row = (size_t)a.expert * N + first[m] + SECOND * half;
                codes[m][half] = a.codes + row * ROW_BYTES + 16 * t;
                const int local = GATED ? half * (HELD_ROWS / 2) + (warp * M_TILES + m) * 8 + g : (warp * M_TILES + m) * 16 + half * 8 + g;
                scales[m][half] = local * SCALE_STRIDE + first_scale(t);
            }
        }
    }
    // Past the end of a row codes are zero and there is no scale.
    __device__ __forceinline__ bool inside(int step) const { return K % GROUP == 0 || step * GROUP + RUN * (int)(threadIdx.x % 4) < K; }
    __device__ __forceinline__ Step load(int step) const {
        Step s;
        const bool here = inside(step);
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                s.codes[m][half] = make_uint4(0u, 0u, 0u, 0u);
                if (here) s.codes[m][half] = stream(codes[m][half] + (size_t)step * 64);
            }
        return s;
    }
    __device__ __forceinline__ void scale_factors(const u8* held, int step, int local, u32 (&times)[M_TILES][2][SCALES_PER_RUN]) const {
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                multipliers(inside(step) ? *(const RunScales*)(held + scales[m][half] + local * (int)STEP_SCALES) : 0, times[m][half]);
    }
};

// Scales of the block's row `local`. GATED: half of the rows are gate rows, half the up rows beside them. Past the end any row will do.
DEVICE const u8* scale_row(const Arguments& a, int local) {
    const int out = min((int)blockIdx.x * (HELD_ROWS / 16 * ROWS) + (GATED ? local % (HELD_ROWS / 2) : local), OUT - 1);
    return a.scales + ((size_t)a.expert * N + out + (GATED && local >= HELD_ROWS / 2 ? OUT : 0)) * SCALE_BYTES;
}

// acc[m][n]: weight rows first[m] (0, 1) and first[m] + SECOND (2, 3), tokens 2t and 2t + 1 of product n.
template <int WIDE>
DEVICE void finish(const Arguments& a, const Rows& r, const float (&acc)[M_TILES][WIDE][4]) {
    const int t = threadIdx.x % 4;
    const float gw = a.w_scale ? a.w_scale[(size_t)a.expert * a.w_scale_stride] : 1.0f;
#pragma unroll
    for (int n = 0; n < WIDE; n++)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int token = 8 * n + 2 * t + odd;
            if (token >= a.count) continue;
            const int slot = a.slot(token);
            const float scale = a.x_scale ? __fmul_rn(a.x_scale[SPREAD ? slot / a.top_k : slot], gw) : gw;
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                if (r.base + ROWS * m >= OUT) continue;
                u16 rounded[2];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float value = __fmul_rn(__fmul_rn(acc[m][n][2 * half + odd], UNFOLD), scale);
                    if (a.bias) value = __fadd_rn(value, a.bias[(size_t)a.expert * N + r.first[m] + SECOND * half]);
                    rounded[half] = bf16(value);
                }
                u16* row = a.y + (size_t)slot * OUT + r.first[m];
#if GATED
                row[0] = bf16(__fmul_rn(magnitude_value(a.table[rounded[0] ^ 0x8000u]), magnitude_value(rounded[1])));
#else
                row[0] = rounded[0];
                row[8] = rounded[1];
#endif
            }
        }
}

// As many products side by side as the tile has tokens: the sums of a token do not change with its neighbours.
template <typename Block>
DEVICE void run_as_wide_as(int count, Block block) {
#if TILES > 6
    if (count > 48) return block.template run<8>();
#endif
#if TILES > 4
    if (count > 32) return block.template run<6>();
#endif
#if TILES > 3
    if (count > 24) return block.template run<4>();
#endif
#if TILES > 2
    if (count > 16) return block.template run<3>();
#endif
#if TILES > 1
    if (count > 8) return block.template run<2>();
#endif
    block.template run<1>();
}
