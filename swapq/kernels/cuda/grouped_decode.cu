// Rows of a few tokens per expert times that expert's matrix, from codes and scales in checkpoint layout.
//
// Weights are the left operand: a warp owns M_TILES x 16 weight rows and streams their codes once, with the next blocks of K already on
// the way; the tokens of a tile wait in shared memory. Every sum runs over K in one order (order.cuh), whatever the tile: a token's bits
// depend on nothing but its own row and the weights. Constants: grouped.cuh.
#include "contract.cuh"
#include "order.cuh"
#include "dependent.cuh"
#include "tensor_core.cuh"
#include "bulk_copy.cuh"
#include "weights.cuh"
#include "grouped.cuh"

constexpr int STRIDE = CHUNK + 16;  // 32 bytes more than a multiple of 128: eight rows fall on different banks

struct OneTile {
    const Arguments& a; u16* tokens; Arrival* arrival;
    template <int WIDE>
    __device__ __forceinline__ void run() const;
};

template <int WIDE>
__device__ __forceinline__ void OneTile::run() const {
    u8* held = (u8*)(tokens + TOKENS * STRIDE);
    u32 phase = 0;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const Rows rows(a);
    Step ahead[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (i < STEPS) ahead[i] = rows.load(i);
    float acc[M_TILES][WIDE][4] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < STEPS; chunk += CHUNK_STEPS) {
        // Tokens and scales of this chunk. Rows of tokens that are not there stay as they are: nothing reads what they give.
        __syncthreads();  // everybody knows the arrival barrier, and has read what is replaced now
        const int width = min(CHUNK, PADDED_K - chunk * GROUP), present = min(a.count, 8 * WIDE);
        const int chunk_byte = chunk * (int)STEP_SCALES, scale_bytes = min(SCALE_CHUNK, (int)SCALE_BYTES - chunk_byte);
        // Copies may arrive before their bytes are announced: the barrier opens after both.
        if (threadIdx.x == 0) arrival_expect(arrival, present * width * 2 + (SCALES_IN_UNITS ? HELD_ROWS * scale_bytes : 0));
        for (int local = threadIdx.x; local < HELD_ROWS; local += 32 * WARPS) {
            const u8* from = scale_row(a, local) + chunk_byte;
            u8* to = held + local * SCALE_STRIDE;
            if (SCALES_IN_UNITS) bulk_copy(to, from, scale_bytes, arrival);
            else for (int i = 0; i < scale_bytes; i++) to[i] = from[i];
        }
        if (!SCALES_IN_UNITS) __syncthreads();
        if (chunk == 0) {  // weights, scales and tiles are older than the kernel before this one; the tokens are its work
            wait_for_previous();
            let_next_start();
        }
        if (threadIdx.x < present) {
            const int slot = a.slot(threadIdx.x);
            bulk_copy(tokens + threadIdx.x * STRIDE, a.x + (size_t)(SPREAD ? slot / a.top_k : slot) * PADDED_K + chunk * GROUP, width * 2, arrival);
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
                if (step + AHEAD < STEPS) ahead[i] = rows.load(step + AHEAD);
                u32 times[M_TILES][2][SCALES_PER_RUN];
                rows.scale_factors(held, step, local, times);
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
    finish<WIDE>(a, rows, acc);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) grouped_decode(
    const u16* __restrict__ x, const float* __restrict__ x_scale, const u8* __restrict__ codes, const u8* __restrict__ scales,
    const float* __restrict__ w_scale, int w_scale_stride, const float* __restrict__ bias, const u16* __restrict__ table,
    const int* __restrict__ slots, const int* __restrict__ tiles, int every_row, int top_k, u16* __restrict__ y) {
    extern __shared__ __align__(16) u8 shared[];  // tokens [TOKENS][STRIDE], then scales [HELD_ROWS][SCALE_STRIDE]
    if (tiles && blockIdx.y >= tiles[0]) {
        wait_for_previous();  // a kernel that ends has waited: the next one relies on it
        return;
    }
    const int* tile = tiles + 1 + 3 * blockIdx.y;
    const int expert = tiles ? tile[0] : 0, first = tiles ? tile[1] : blockIdx.y * TOKENS;
    const int count = tiles ? tile[2] : min(TOKENS, every_row - first);
    const Arguments a = {x, x_scale, codes, scales, w_scale, w_scale_stride, bias, table, tiles ? slots : nullptr, first, expert, count, top_k, y};
    __shared__ Arrival arrival;
    if (threadIdx.x == 0) arrival_init(&arrival);
    run_as_wide_as(count, OneTile{a, (u16*)shared, &arrival});
}
