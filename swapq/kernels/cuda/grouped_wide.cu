// The same product as grouped_decode.cu, bit for bit, for tens of tokens per expert: four warps multiply together (sm_90a), and the tensor
// core reads the tokens from shared memory by itself. Tokens and scales of the next chunk of K are on the way while one is multiplied.
// Rows of tokens come with the order's COLUMNS; WARPS is a multiple of 4. Constants: grouped.cuh.
#define COLUMNS 1
#include "contract.cuh"
#include "order.cuh"
#include "dependent.cuh"
#include "weights.cuh"
#include "grouped.cuh"
#include "copies.cuh"
#include "warpgroup.cuh"

constexpr int CHUNKS = (STEPS + CHUNK_STEPS - 1) / CHUNK_STEPS, BUFFERS = CHUNKS > 1 ? 2 : 1;
constexpr int TILE_BYTES = CHUNK / 8 * Columns<TILES>::BYTES, BUFFER_BYTES = TILE_BYTES + HELD_ROWS * SCALE_STRIDE;
constexpr int SCALE_UNITS = SCALE_CHUNK / 16;  // of 16 bytes

// Starts the copies of a chunk. Rows of tokens that are not there stay as they are: nothing reads what they give.
template <int WIDE>
DEVICE void bring(const Arguments& a, u8* buffer, int chunk) {
    const int from = chunk * CHUNK, width = min(CHUNK, PADDED_K - from);
    const int from_byte = from / SCALE_BLOCK, scale_bytes = min(SCALE_CHUNK, (int)SCALE_BYTES - from_byte);
    u8* held = buffer + TILE_BYTES;
    if constexpr (SCALES_IN_UNITS) {
        for (int i = threadIdx.x; i < HELD_ROWS * SCALE_UNITS; i += 32 * WARPS) {
            const int local = i / SCALE_UNITS, at = i % SCALE_UNITS * 16;
            if (at < scale_bytes) copy_16_bytes(held + local * SCALE_STRIDE + at, scale_row(a, local) + from_byte + at);
        }
    } else {
        for (int local = threadIdx.x; local < HELD_ROWS; local += 32 * WARPS) {
            const u8* row = scale_row(a, local) + from_byte;
            for (int i = 0; i < scale_bytes; i++) held[local * SCALE_STRIDE + i] = row[i];
        }
    }
    if (chunk == 0) {  // weights, scales and tiles are older than the kernel before this one; the tokens are its work
        wait_for_previous();
        let_next_start();
    }
    const int present = min(a.count, 8 * WIDE);
    for (int token = threadIdx.x / 32; token < present; token += WARPS) {
        const int slot = a.slot(token);
        const u16* row = a.x + (size_t)(SPREAD ? slot / a.top_k : slot) * PADDED_K + from;
        for (int unit = threadIdx.x % 32; unit < width / 8; unit += 32)
            copy_16_bytes(buffer + unit * Columns<WIDE>::BYTES + 16 * token, row + 8 * unit);
    }
}

struct OneTile {
    const Arguments& a; u8* shared;
    template <int WIDE>
    __device__ __forceinline__ void run() const;
};

template <int WIDE>
__device__ __forceinline__ void OneTile::run() const {
    const Rows rows(a);
    Step ahead[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (i < STEPS) ahead[i] = rows.load(i);
    bring<WIDE>(a, shared, 0);
    copies_commit();

    float acc[M_TILES][WIDE][4] = {};
    u32 pairs[M_TILES][2][4];
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const u8* buffer = shared + chunk % BUFFERS * BUFFER_BYTES;
        if (chunk + 1 < CHUNKS) bring<WIDE>(a, shared + (chunk + 1) % BUFFERS * BUFFER_BYTES, chunk + 1);
        copies_commit();
        copies_wait_but_newest();
        show_to_products();
        __syncthreads();
        const u64 right = Columns<WIDE>::descriptor(buffer);
        const int steps = min(CHUNK_STEPS, STEPS - chunk * CHUNK_STEPS);
#pragma unroll 1
        for (int outer = 0; outer < steps; outer += AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int local = outer + i, step = chunk * CHUNK_STEPS + local;
                if (local >= steps) break;
                u32 times[M_TILES][2][SCALES_PER_RUN];
                rows.scale_factors(buffer + TILE_BYTES, step, local, times);
                // One set of operands: while it is multiplied, other warps make theirs.
#pragma unroll
                for (int q = 0; q < EIGHTS; q++) {
                    products_wait();
#pragma unroll
                    for (int m = 0; m < M_TILES; m++)
#pragma unroll
                        for (int half = 0; half < 2; half++)
                            expand_eight((const u32*)&ahead[i].codes[m][half], q, times[m][half][scale_of_eight(q)], pairs[m][half]);
                    products_fence();
#pragma unroll
                    for (int h = 0; h < 2; h++)
#pragma unroll
                        for (int m = 0; m < M_TILES; m++) {
                            const u32 left[4] = {pairs[m][0][2 * h], pairs[m][1][2 * h], pairs[m][0][2 * h + 1], pairs[m][1][2 * h + 1]};
                            multiply_add<WIDE>(acc[m], left, right + (local * (GROUP / 16) + 2 * q + h) * Columns<WIDE>::SIXTEEN);
                        }
                    products_commit();
                }
                if (step + AHEAD < STEPS) ahead[i] = rows.load(step + AHEAD);  // into the registers that are free now
            }
        }
        products_wait();
        if (chunk + 1 < CHUNKS) __syncthreads();  // everybody has read what the next copies replace
    }
    finish<WIDE>(a, rows, acc);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) grouped_wide(
    const u16* __restrict__ x, const float* __restrict__ x_scale, const u8* __restrict__ codes, const u8* __restrict__ scales,
    const float* __restrict__ w_scale, int w_scale_stride, const float* __restrict__ bias, const u16* __restrict__ table,
    const int* __restrict__ slots, const int* __restrict__ tiles, int every_row, int top_k, u16* __restrict__ y) {
    extern __shared__ __align__(16) u8 shared[];  // BUFFERS of tokens (warpgroup.cuh) and scales [HELD_ROWS][SCALE_STRIDE]
    if (tiles && blockIdx.y >= tiles[0]) {
        wait_for_previous();  // a kernel that ends has waited: the next one relies on it
        return;
    }
    const int* tile = tiles + 1 + 3 * blockIdx.y;
    const int expert = tiles ? tile[0] : 0, first = tiles ? tile[1] : blockIdx.y * TOKENS;
    const int count = tiles ? tile[2] : min(TOKENS, every_row - first);
    const Arguments a = {x, x_scale, codes, scales, w_scale, w_scale_stride, bias, table, tiles ? slots : nullptr, first, expert, count, top_k, y};
    run_as_wide_as(count, OneTile{a, shared});
}
