// Rows of a few tokens per expert times that expert's matrix, from codes and scales in checkpoint layout.
//
// Weights are the left operand: a warp owns M_TILES x 16 weight rows and streams their codes once, with the next blocks of K already on
// the way; the tokens of a tile wait in shared memory. Every sum runs over K in one order (order.cuh), whatever the tile: a token's bits
// depend on nothing but its own row and the weights.
//
// The grid is as large as fits on the GPU. A block takes its even share of the items (a tile of tokens times the weight rows that a block
// covers), one after the other: the codes and block scales of the next are under way while one is multiplied, and tokens stay where they
// are while the tile does.
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
#include "contract.cuh"
#include "order.cuh"
#include "dependent.cuh"
#include "tensor_core.cuh"
#include "bulk_copy.cuh"
#include "weights.cuh"

constexpr int TOKENS = 8 * TILES, STEPS = PADDED_K / GROUP, CHUNK_STEPS = CHUNK / GROUP, CHUNKS = (STEPS + CHUNK_STEPS - 1) / CHUNK_STEPS;
constexpr int ROUNDS = (STEPS + AHEAD - 1) / AHEAD * AHEAD;  // steps of an item, those past the end of K included
constexpr int STRIDE = CHUNK + 16;  // 32 bytes more than a multiple of 128: eight rows fall on different banks
constexpr int OUT = GATED ? N / 2 : N, ROWS = GATED ? 8 : 16;  // output rows of a tile of 16 weight rows
constexpr int SECOND = GATED ? OUT : 8;                        // from a thread's first weight row of a tile to its second
constexpr int BLOCK_OUT = ROWS * M_TILES * WARPS, PARTS = (OUT + BLOCK_OUT - 1) / BLOCK_OUT;  // output rows of an item, items of a tile

// 16 bytes that are read once; the level-2 cache fetches whole lines.
DEVICE uint4 stream(const u8* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

// Block scales of the block's weight rows wait in shared memory too.
constexpr int HELD_ROWS = 16 * M_TILES * WARPS, SCALE_CHUNK = CHUNK / SCALE_BLOCK, SCALE_STRIDE = SCALE_CHUNK + 16;
constexpr bool BULK_SCALES = SCALE_BYTES % 16 == 0 && SCALE_CHUNK % 16 == 0;

struct Step { uint4 codes[M_TILES][2]; };

struct Arguments {
    const u16* x; const float* x_scale; const u8* codes; const u8* scales; const float* w_scale; int w_scale_stride;
    const float* bias; const u16* table; const int* slots; const int* tiles; int every_row, top_k; u16* y;
    // A tile: expert, first position in slots, slots. Without a table there is one expert, and it takes every row in its place.
    __device__ __forceinline__ int tile_count() const { return tiles ? tiles[0] : (every_row + TOKENS - 1) / TOKENS; }
    __device__ __forceinline__ int expert(int tile) const { return tiles ? tiles[1 + 3 * tile] : 0; }
    __device__ __forceinline__ int first(int tile) const { return tiles ? tiles[2 + 3 * tile] : tile * TOKENS; }
    __device__ __forceinline__ int count(int tile) const { return tiles ? tiles[3 + 3 * tile] : min(TOKENS, every_row - tile * TOKENS); }
    __device__ __forceinline__ int slot(int place) const { return tiles ? slots[place] : place; }
    __device__ __forceinline__ int row(int slot) const { return SPREAD ? slot / top_k : slot; }
};

// Output row of a warp's tile of 16 weight rows; past the end it takes the first rows again, and their results are not stored.
DEVICE int tile_row(int part, int m) {
    const int row = part * BLOCK_OUT + ((int)threadIdx.x / 32 * M_TILES + m) * ROWS;
    return row < OUT ? row : 0;
}

// The codes of a block's items, AHEAD steps at a time, across the borders of items.
struct Codes {
    static constexpr bool EVEN = OUT % BLOCK_OUT == 0;          // no tile of rows lies past the end
    static constexpr bool WHOLE = K % (GROUP * AHEAD) == 0;     // nor a step
    const u8* at[EVEN ? 1 : M_TILES];
    int item, end, step;

    __device__ __forceinline__ void place(const Arguments& a) {
        const size_t matrix = (size_t)a.expert(item / PARTS) * N;
#pragma unroll
        for (int m = 0; m < (EVEN ? 1 : M_TILES); m++)
            at[m] = a.codes + (matrix + tile_row(item % PARTS, m) + threadIdx.x % 32 / 4) * ROW_BYTES + 16 * (threadIdx.x % 4);
        step = 0;
    }
    // Step i of the AHEAD.
    __device__ __forceinline__ Step load(int i) const {
        Step s;
        const bool inside = WHOLE || (step + i) * GROUP + RUN * (int)(threadIdx.x % 4) < K;
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (!WHOLE) s.codes[m][half] = make_uint4(0u, 0u, 0u, 0u);
                if (inside) s.codes[m][half] = stream(at[EVEN ? 0 : m] + (EVEN ? m * ROWS * ROW_BYTES : 0) + half * SECOND * ROW_BYTES + 64 * i);
            }
        return s;
    }
    // After the last item its first steps are read again: they are near, and nobody uses them.
    __device__ __forceinline__ void advance(const Arguments& a) {
        step += AHEAD;
#pragma unroll
        for (int m = 0; m < (EVEN ? 1 : M_TILES); m++) at[m] += 64 * AHEAD;
        if (step == ROUNDS) {
            if (item + 1 < end) item++;
            place(a);
        }
    }
};

// What a block keeps in shared memory: the tokens of a tile, and the block scales of the rows that it multiplies now and next.
struct Shared {
    u16* tokens;       // [TOKENS][STRIDE]
    u8* scales;        // [2][HELD_ROWS][SCALE_STRIDE]
    Arrival* arrival;  // [3]: of either half of the scales, and of the tokens
    __device__ __forceinline__ u8* half(int stage) const { return scales + stage % 2 * HELD_ROWS * SCALE_STRIDE; }

    // Starts the way of the scales of one chunk of an item; every thread of the block takes part.
    __device__ __forceinline__ void fetch_scales(const Arguments& a, int item, int chunk, int stage) const {
        const int chunk_byte = chunk * CHUNK_STEPS * (int)STEP_SCALES, bytes = min(SCALE_CHUNK, (int)SCALE_BYTES - chunk_byte);
        const size_t matrix = (size_t)a.expert(item / PARTS) * N;
        if (BULK_SCALES && threadIdx.x == 0) arrival_expect(arrival + stage % 2, HELD_ROWS * bytes);
        for (int local = threadIdx.x; local < HELD_ROWS; local += 32 * WARPS) {
            // GATED: half of the rows are gate rows, half the up rows beside them. Past the end any row will do.
            const int out = min(item % PARTS * BLOCK_OUT + (GATED ? local % (HELD_ROWS / 2) : local), OUT - 1);
            const u8* from = a.scales + (matrix + out + (GATED && local >= HELD_ROWS / 2 ? OUT : 0)) * SCALE_BYTES + chunk_byte;
            u8* to = half(stage) + local * SCALE_STRIDE;
            if (BULK_SCALES) bulk_copy(to, from, bytes, arrival + stage % 2);
            else for (int i = 0; i < bytes; i++) to[i] = from[i];
        }
    }
    // Rows of tokens that are not there stay as they are: nothing reads what they give.
    __device__ __forceinline__ void fetch_tokens(const Arguments& a, int first, int present, int chunk) const {
        const int width = min(CHUNK, PADDED_K - chunk * CHUNK);
        if (threadIdx.x == 0) arrival_expect(arrival + 2, present * width * 2);
        if (threadIdx.x < present)
            bulk_copy(tokens + threadIdx.x * STRIDE, a.x + (size_t)a.row(a.slot(first + threadIdx.x)) * PADDED_K + chunk * CHUNK, width * 2, arrival + 2);
    }
};

struct State {
    Codes codes;
    Step ahead[AHEAD];
    int stage;        // chunks of items so far
    u32 token_phase;
};

// The items [item, last) of one tile.
template <int WIDE>
DEVICE void run(const Arguments& a, const Shared& shared, State& state, int item, int last) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int tile = item / PARTS, expert = a.expert(tile), first = a.first(tile), count = a.count(tile);
    int scale_at[M_TILES][2];
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int local = GATED ? half * (HELD_ROWS / 2) + (warp * M_TILES + m) * 8 + g : (warp * M_TILES + m) * 16 + half * 8 + g;
            scale_at[m][half] = local * SCALE_STRIDE + first_scale(t);
        }
    bool fresh = true;  // the tile's tokens are not here yet
#pragma unroll 1
    for (; item < last; item++) {
        float acc[M_TILES][WIDE][4] = {};
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; chunk++, state.stage++) {
            __syncthreads();  // everybody has read the tokens and scales that are replaced now
            if (fresh || CHUNKS > 1) {
                if (state.stage == 0) {  // weights, scales and tiles are older than the kernel before this one; the tokens are its work
                    wait_for_previous();
                    let_next_start();
                }
                shared.fetch_tokens(a, first, min(count, 8 * WIDE), chunk);
            }
            if (chunk + 1 < CHUNKS) shared.fetch_scales(a, item, chunk + 1, state.stage + 1);
            else if (item + 1 < state.codes.end) shared.fetch_scales(a, item + 1, 0, state.stage + 1);
            if (BULK_SCALES) arrival_wait(shared.arrival + state.stage % 2, state.stage / 2 & 1);
            if (fresh || CHUNKS > 1) {
                arrival_wait(shared.arrival + 2, state.token_phase);
                state.token_phase ^= 1u;
                fresh = false;
            }
            const u8* held = shared.half(state.stage);
            const int steps = min(CHUNK_STEPS, ROUNDS - chunk * CHUNK_STEPS);
#pragma unroll 1
            for (int outer = 0; outer < steps; outer += AHEAD) {
#pragma unroll
                for (int i = 0; i < AHEAD; i++) {
                    const int local = outer + i, step = chunk * CHUNK_STEPS + local;
                    const Step s = state.ahead[i];
                    state.ahead[i] = state.codes.load(i);
                    if (ROUNDS != STEPS && step >= STEPS) continue;
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
                    const u16* at = shared.tokens + g * STRIDE + local * GROUP + t * 4;
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
                state.codes.advance(a);
            }
        }

        // acc[m][n]: weight rows row + g (0, 1) and row + g + SECOND (2, 3), tokens 2t and 2t + 1 of tile n.
        const float gw = a.w_scale ? a.w_scale[(size_t)expert * a.w_scale_stride] : 1.0f;
#pragma unroll
        for (int n = 0; n < WIDE; n++)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const int token = 8 * n + 2 * t + odd;
                if (token >= count) continue;
                const int slot = a.slot(first + token);
                const float scale = a.x_scale ? __fmul_rn(a.x_scale[a.row(slot)], gw) : gw;
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    if (item % PARTS * BLOCK_OUT + (warp * M_TILES + m) * ROWS >= OUT) continue;
                    const int row = tile_row(item % PARTS, m) + g;
                    u16 rounded[2];
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float value = __fmul_rn(__fmul_rn(acc[m][n][2 * half + odd], UNFOLD), scale);
                        if (a.bias) value = __fadd_rn(value, a.bias[(size_t)expert * N + row + SECOND * half]);
                        rounded[half] = bf16(value);
                    }
                    u16* to = a.y + (size_t)slot * OUT + row;
#if GATED
                    to[0] = bf16(__fmul_rn(magnitude_value(a.table[rounded[0] ^ 0x8000u]), magnitude_value(rounded[1])));
#else
                    to[0] = rounded[0];
                    to[8] = rounded[1];
#endif
                }
            }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) grouped_decode(
    const u16* __restrict__ x, const float* __restrict__ x_scale, const u8* __restrict__ codes, const u8* __restrict__ scales,
    const float* __restrict__ w_scale, int w_scale_stride, const float* __restrict__ bias, const u16* __restrict__ table,
    const int* __restrict__ slots, const int* __restrict__ tiles, int every_row, int top_k, u16* __restrict__ y) {
    extern __shared__ __align__(16) u16 tokens[];
    __shared__ Arrival arrival[3];
    const Arguments a = {x, x_scale, codes, scales, w_scale, w_scale_stride, bias, table, slots, tiles, every_row, top_k, y};
    const long long items = (long long)a.tile_count() * PARTS;
    const int begin = (int)(items * blockIdx.x / gridDim.x), end = (int)(items * (blockIdx.x + 1) / gridDim.x);
    if (begin == end) {
        wait_for_previous();  // a kernel that ends has waited: the next one relies on it
        return;
    }
    const Shared shared = {tokens, (u8*)(tokens + TOKENS * STRIDE), arrival};
    State state;
    state.codes.item = begin;
    state.codes.end = end;
    state.codes.place(a);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) state.ahead[i] = state.codes.load(i);
    state.codes.advance(a);
    state.stage = 0;
    state.token_phase = 0;
    if (threadIdx.x == 0)
        for (int i = 0; i < 3; i++) arrival_init(arrival + i);
    __syncthreads();
    shared.fetch_scales(a, begin, 0, 0);
#pragma unroll 1
    for (int item = begin; item < end;) {
        const int tile = item / PARTS, last = min(end, (tile + 1) * PARTS), count = a.count(tile);
        // As many products side by side as the tile has tokens: the sums of a token do not change with its neighbours.
        if (TILES > 4 && count > 32) run<TILES>(a, shared, state, item, last);
        else if (TILES > 3 && count > 24) run<TILES < 4 ? TILES : 4>(a, shared, state, item, last);
        else if (TILES > 3 && count > 16) run<TILES < 3 ? TILES : 3>(a, shared, state, item, last);
        else if (TILES > 1 && count > 8) run<TILES < 2 ? TILES : 2>(a, shared, state, item, last);
        else run<1>(a, shared, state, item, last);
        item = last;
    }
}
