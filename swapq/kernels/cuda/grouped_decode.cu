// Rows of a few tokens per expert times that expert's matrix, from codes and scales in checkpoint layout.
//
// Weights are the left operand: a warp owns M_TILES x 16 weight rows and streams their codes once, with the next blocks of K already on
// the way; the tokens of a tile wait in shared memory. Every sum runs over K in one order (order.cuh), whatever the tile: a token's bits
// depend on nothing but its own row and the weights.
//
// -D K, N         contraction length (a multiple of 32) and output rows of an expert's matrix
//    NVFP4        1: codes [E, N, K/2], scales E4M3 [E, N, K/16], FP32 scale [E]; 0: MXFP8 codes [E, N, K], scales [E, N, K/32]
//    GROUP        elements in one round of the order: 128 for NVFP4, 64 for MXFP8
//    TILES        products side by side at most: 8 tokens each
//    M_TILES      16 weight rows each: 1 or 2
//    WARPS        warps of a block;  BLOCKS: blocks on one multiprocessor at least
//    CHUNK        elements of K in shared memory at a time (a multiple of GROUP * AHEAD, or all of K)
//    AHEAD        blocks of K in flight per warp
//    LINES        128-byte lines of each weight row that are on their way to the level-2 cache beside them: 0 for none
//    GATED        1: rows [0, N/2) are gate, [N/2, N) up; the output is bf16(table[gate]) * up, [slots, N/2]
//    SPREAD       1: the activation row of a slot is slot / top_k (tokens); 0: the slot itself
#include "contract.cuh"
#include "order.cuh"
#include "dependent.cuh"
#include "tensor_core.cuh"
#include "bulk_copy.cuh"
#include "weights.cuh"

static_assert(8 * TILES <= 32 * WARPS, "each token of a tile is asked for by a thread");
constexpr int TOKENS = 8 * TILES, STEPS = PADDED_K / GROUP, CHUNK_STEPS = CHUNK / GROUP;
static_assert(CHUNK_STEPS >= STEPS || CHUNK_STEPS % AHEAD == 0, "a chunk begins with the first of the blocks in flight");
constexpr int STRIDE = CHUNK + 16;  // 32 bytes more than a multiple of 128: eight rows fall on different banks
constexpr int OUT = GATED ? N / 2 : N, ROWS = GATED ? 8 : 16;  // output rows of a tile of 16 weight rows
constexpr int SECOND = GATED ? OUT : 8;                        // from a thread's first weight row of a tile to its second

// 16 bytes that are read once; the level-2 cache fetches whole lines.
DEVICE uint4 stream(const u8* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

// What the epilogue needs, asked for long before. Places of tokens that are not there stay as they are.
struct Known { int slot[TOKENS]; float scale[TOKENS], weight_scale; };

// Block scales of the block's weight rows wait in shared memory too.
constexpr int HELD_ROWS = 16 * M_TILES * WARPS, SCALE_CHUNK = CHUNK / SCALE_BLOCK, SCALE_STRIDE = SCALE_CHUNK + 16;
constexpr int UNIT = SCALE_BYTES % 16 == 0 && SCALE_CHUNK % 16 == 0 ? 16 : 1, UNITS = SCALE_CHUNK / UNIT;  // what a thread copies at a time

struct Step { uint4 codes[M_TILES][2]; };

struct Arguments {
    const u16* x; const float* x_scale; const u8* codes; const u8* scales; const float* w_scale; int w_scale_stride;
    const float* bias; const u16* table; const int* slots; int first, expert, count, top_k; u16* y;
    // Asked for where it stands, ahead of what does not need it.
    __device__ __forceinline__ int slot(int i) const {
        int slot = first + i;
        if (slots) asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(slot) : "l"(slots + slot));
        return slot;
    }
};

template <int WIDE>
DEVICE void run(const Arguments& a, u16* tokens, Arrival* arrival, Known* known) {
    u8* held = (u8*)(tokens + 8 * TILES * STRIDE);
    const int present = min(a.count, 8 * WIDE), my_slot = threadIdx.x < present ? a.slot(threadIdx.x) : 0;
    u32 phase = 0;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int base = (blockIdx.x * WARPS + warp) * (ROWS * M_TILES);
    const int block_row = blockIdx.x * (HELD_ROWS / 16 * ROWS);
    int rows[M_TILES];  // first weight row of this thread in each tile
    const u8* code_at[M_TILES][2];
    int scale_at[M_TILES][2];
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        rows[m] = (base + ROWS * m < OUT ? base + ROWS * m : 0) + g;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const size_t row = (size_t)a.expert * N + rows[m] + SECOND * half;
            code_at[m][half] = a.codes + row * ROW_BYTES + 16 * t;
            const int local = GATED ? half * (HELD_ROWS / 2) + (warp * M_TILES + m) * 8 + g : (warp * M_TILES + m) * 16 + half * 8 + g;
            scale_at[m][half] = local * SCALE_STRIDE + first_scale(t);
        }
    }
    auto load = [&](int step) {
        Step s;
        const bool inside = K % GROUP == 0 || step * GROUP + RUN * t < K;
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                s.codes[m][half] = make_uint4(0u, 0u, 0u, 0u);
                if (inside) s.codes[m][half] = stream(code_at[m][half] + (size_t)step * 64);
            }
        return s;
    };

#if LINES
    // Each lane brings lines of one of the warp's weight rows into the level-2 cache. Two steps read a line.
    const int my_tile = base + ROWS * (lane / 16), my_row = (my_tile < OUT ? my_tile : 0) + lane % 8 + SECOND * (lane / 8 % 2);
    const u8* my_codes = a.codes + ((size_t)a.expert * N + my_row) * ROW_BYTES;
    auto bring_line = [&](int line) {
        if (lane < 16 * M_TILES && line * 128 < (int)ROW_BYTES) prefetch_line(my_codes + line * 128);
    };
#pragma unroll
    for (int line = 0; line < LINES; line++) bring_line(line);
#endif
    Step ahead[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (i < STEPS) ahead[i] = load(i);

    float acc[M_TILES][WIDE][4] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < STEPS; chunk += CHUNK_STEPS) {
        // Tokens and scales of this chunk. Rows of tokens that are not there stay as they are: nothing reads what they give.
        __syncthreads();  // everybody knows the arrival barrier, and has read what is replaced now
        const int width = min(CHUNK, PADDED_K - chunk * GROUP);
        const int chunk_byte = chunk * (int)STEP_SCALES, scale_bytes = min(SCALE_CHUNK, (int)SCALE_BYTES - chunk_byte);
        // Copies may arrive before their bytes are announced: the barrier opens after both.
        if (threadIdx.x == 0) arrival_expect(arrival, present * width * 2);
        for (int i = threadIdx.x; i < HELD_ROWS * UNITS; i += 32 * WARPS) {
            const int local = i / UNITS, at = i % UNITS * UNIT;
            // GATED: half of the rows are gate rows, half the up rows beside them. Past the end any row will do.
            const int out = min(block_row + (GATED ? local % (HELD_ROWS / 2) : local), OUT - 1);
            const u8* from = a.scales + ((size_t)a.expert * N + out + (GATED && local >= HELD_ROWS / 2 ? OUT : 0)) * SCALE_BYTES + chunk_byte + at;
            u8* to = held + local * SCALE_STRIDE + at;
            if (at >= scale_bytes) continue;
            if constexpr (UNIT == 16) copy_unit(to, from);
            else *to = *from;
        }
        arrival_arrive_after_copies(arrival);
        if (UNIT == 1) __syncthreads();
        if (chunk == 0) {  // weights, scales and tiles are older than the kernel before this one; the tokens are its work
            wait_for_previous();
            let_next_start();
        }
        if (threadIdx.x < present) {
            if (chunk == 0) known->slot[threadIdx.x] = my_slot;
            const int slot = known->slot[threadIdx.x];
            const size_t row = SPREAD ? slot / a.top_k : slot;
            if (chunk == 0) {
                if (a.x_scale) copy_float(&known->scale[threadIdx.x], a.x_scale + row);
                if (a.w_scale && threadIdx.x == 0) copy_float(&known->weight_scale, a.w_scale + (size_t)a.expert * a.w_scale_stride);
            }
            bulk_copy(tokens + threadIdx.x * STRIDE, a.x + row * PADDED_K + chunk * GROUP, width * 2, arrival);
        }
        arrival_wait(arrival, phase);
        phase ^= 1u;
        const int steps = min(CHUNK_STEPS, STEPS - chunk);
#pragma unroll 1
        for (int outer = 0; outer < steps; outer += AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int local = outer + i, step = chunk + local;
                if (local >= steps) break;
                const Step s = ahead[i];
                if (step + AHEAD < STEPS) ahead[i] = load(step + AHEAD);
#if LINES
                if (step % 2 == 0) bring_line(step / 2 + LINES);
#endif
                u32 times[M_TILES][2][SCALES_PER_RUN];
#pragma unroll
                for (int m = 0; m < M_TILES; m++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        // Past the end of a row codes are zero and there is no scale.
                        const bool inside = K % GROUP == 0 || step * GROUP + RUN * t < K;
                        const u32 scales = inside ? *(const RunScales*)(held + scale_at[m][half] + local * (int)STEP_SCALES) : 0;
                        multipliers(scales, times[m][half]);
                    }
                const u16* at = tokens + g * STRIDE + local * GROUP + t * 4;
#pragma unroll
                for (int q = 0; q < EIGHTS; q++) {
                    u32 pairs[M_TILES][2][4];
#pragma unroll
                    for (int m = 0; m < M_TILES; m++)
#pragma unroll
                        for (int half = 0; half < 2; half++)
                            expand_eight((const u32*)&s.codes[m][half], q, times[m][half][scale_of_eight(q)], pairs[m][half]);
#pragma unroll
                    for (int h = 0; h < 2; h++)
#pragma unroll
                        for (int n = 0; n < WIDE; n++) {
                            const uint2 b = *(const uint2*)(at + n * 8 * STRIDE + q * 32 + h * 16);
                            const u32 right[2] = {b.x, b.y};
#pragma unroll
                            for (int m = 0; m < M_TILES; m++) {
                                const u32 left[4] = {pairs[m][0][2 * h], pairs[m][1][2 * h], pairs[m][0][2 * h + 1], pairs[m][1][2 * h + 1]};
                                multiply_add(acc[m][n], left, right);
                            }
                        }
                }
            }
        }
    }

    // acc[m][n]: weight rows rows[m] (0, 1) and rows[m] + SECOND (2, 3), tokens 2t and 2t + 1 of tile n.
    copies_wait();
    __syncthreads();
    const float gw = a.w_scale ? known->weight_scale : 1.0f;
#pragma unroll
    for (int n = 0; n < WIDE; n++) {
        u16 rounded[2][M_TILES][2];
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const float scale = a.x_scale ? __fmul_rn(known->scale[8 * n + 2 * t + odd], gw) : gw;
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float value = __fmul_rn(__fmul_rn(acc[m][n][2 * half + odd], UNFOLD), scale);
                    if (a.bias) value = __fadd_rn(value, a.bias[(size_t)a.expert * N + rows[m] + SECOND * half]);
                    rounded[odd][m][half] = bf16(value);
                }
        }
#if GATED
        // All gates are looked up before one is used; those of tokens that are not there have places in the table too.
        u16 gate[2][M_TILES];
#pragma unroll
        for (int odd = 0; odd < 2; odd++)
#pragma unroll
            for (int m = 0; m < M_TILES; m++) gate[odd][m] = a.table[rounded[odd][m][0] ^ 0x8000u];
#endif
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int token = 8 * n + 2 * t + odd;
            if (token >= a.count) continue;
            u16* to = a.y + (size_t)known->slot[token] * OUT;
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                if (base + ROWS * m >= OUT) continue;
#if GATED
                to[rows[m]] = bf16(__fmul_rn(magnitude_value(gate[odd][m]), magnitude_value(rounded[odd][m][1])));
#else
                to[rows[m]] = rounded[odd][m][0];
                to[rows[m] + 8] = rounded[odd][m][1];
#endif
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) grouped_decode(
    const u16* __restrict__ x, const float* __restrict__ x_scale, const u8* __restrict__ codes, const u8* __restrict__ scales,
    const float* __restrict__ w_scale, int w_scale_stride, const float* __restrict__ bias, const u16* __restrict__ table,
    const int* __restrict__ slots, const int* __restrict__ tiles, int every_row, int top_k, u16* __restrict__ y) {
    extern __shared__ __align__(16) u16 tokens[];  // [TOKENS][STRIDE], then scales [HELD_ROWS][SCALE_STRIDE]
    if (tiles && blockIdx.y >= tiles[0]) {
        wait_for_previous();  // a kernel that ends has waited: the next one relies on it
        return;
    }
    __shared__ Arrival arrival;
    __shared__ Known known;
    if (threadIdx.x == 0) arrival_init(&arrival, 1 + 32 * WARPS);
    // A tile: expert, first position in slots, slots. Without a table there is one expert, and it takes every row in its place.
    const int* tile = tiles + 1 + 3 * blockIdx.y;
    const int expert = tiles ? tile[0] : 0, first = tiles ? tile[1] : blockIdx.y * TOKENS;
    const int count = tiles ? tile[2] : min(TOKENS, every_row - first);
    const Arguments a = {x, x_scale, codes, scales, w_scale, w_scale_stride, bias, table, tiles ? slots : nullptr, first, expert, count, top_k, y};
    // As many products side by side as the tile has tokens: the sums of a token do not change with its neighbours.
#if TILES > 4
    if (count > 32) return run<TILES>(a, tokens, &arrival, &known);
#endif
#if TILES > 3
    if (count > 24) return run<4>(a, tokens, &arrival, &known);
#endif
#if TILES > 2
    if (count > 16) return run<3>(a, tokens, &arrival, &known);
#endif
#if TILES > 1
    if (count > 8) return run<2>(a, tokens, &arrival, &known);
#endif
    run<1>(a, tokens, &arrival, &known);
}
