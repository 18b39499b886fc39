// A stack of matrices to NVFP4 with one FP32 scale each (contract section 2), read from memory once: matrices wait in the shared memory
// of a team of blocks until their amax is known, while others are on their way.
//
// WARPS warps compute; three more serve them, so that no computing warp ever waits for memory or for the team while there is work: one
// fetches slices, one publishes the amax of a slice to the team, one collects the amax of a matrix and makes the table of factors that
// follows from it. They meet at barriers in shared memory.
//
// -D K, N         a matrix is [N, K], contiguous
//    ROWS         rows of a slice: what one block holds of a matrix
//    TEAM         blocks that share a matrix: ceil(N / ROWS)
//    SLOTS        slices that a block holds at a time, of consecutive matrices of its team
//    LEAD         matrices between the amax of one and the codes of another, less than SLOTS: what hides the wait for the team
//    WARPS
// All blocks of the grid must be on the GPU at once (cooperative launch): a team waits for its own members. Two share a multiprocessor.
// How long a slice stays bounds the speed, so what the team shares takes one trip to the level-2 cache and one back.
//
// tops: 0 at first, [matrices, TEAM]; the amax of each slice as BF16 bits, with the highest bit set to say that it is there.
#include "contract.cuh"
#include "bulk_copy.cuh"

constexpr int BLOCKS = K / 16, SLICE = ROWS * K;  // elements
constexpr int THREADS = 32 * WARPS;               // that compute
constexpr u32 COPY = 16384;                       // bytes of one copy at most

static_assert(LEAD < SLOTS && WARPS <= 32, "a slot is filled again when its codes are written; one warp collects from all");

// A slot's barriers: its slice is here; every warp has its amax; the matrix's scales are here; every thread has written its codes.
struct Slot { Arrival full, taken, known, free; };

// What follows from a matrix's amax: what the amax of a block is multiplied by, and the factor of a block for each code of its scale.
struct Scales { float mult, factor[128]; };

// max_magnitude without a mask for each pair: signs mean nothing before the pair is folded. Not for kernels that hold rows in registers:
// with it the compiler gave quantize_rows tens of them more.
DEVICE u32 larger(u32 a, u32 b) {
    u32 pair;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}
DEVICE u32 largest(const uint4& v) { return larger(larger(v.x, v.y), larger(v.z, v.w)); }
DEVICE u32 folded(u32 pair) {
    u16 most;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; max.NaN.xorsign.abs.bf16 %0, l, h;}" : "=h"(most) : "r"(pair));
    return most & 0x7FFFu;
}

// Tops carry their own news: nothing else is published with them, so that no fence is needed.
constexpr u32 THERE = 0x80000000u;
DEVICE void store_relaxed(u32* at, u32 value) { asm volatile("st.relaxed.gpu.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory"); }
DEVICE u32 load_relaxed(const u32* at) {
    u32 value;
    asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

// The highest of a team's tops, once all are there; for a whole warp.
DEVICE u32 highest(const u32* tops, int lane) {
    u32 most, least;
    do {
        most = THERE, least = THERE;
#pragma unroll
        for (int i = 0; i < (TEAM + 31) / 32; i++) {
            const u32 top = i * 32 + lane < TEAM ? load_relaxed(tops + i * 32 + lane) : THERE;
            most = max(most, top), least = min(least, top);
        }
    } while (!__all_sync(0xFFFFFFFFu, least >= THERE));
    return __reduce_max_sync(0xFFFFFFFFu, most) & ~THERE;
}

extern "C" __global__ void __launch_bounds__(THREADS + 96, 2) quantize_stack(
    const u16* __restrict__ x, int matrices, u32* tops, uint2* __restrict__ codes, u8* __restrict__ scales,
    float* __restrict__ global_scales) {
    extern __shared__ __align__(128) u16 slices[];  // [SLOTS][SLICE]
    __shared__ Slot slots[SLOTS];
    __shared__ u32 warp_top[SLOTS][WARPS];
    __shared__ Scales tables[LEAD + 1];  // of as many matrices: a warp takes an amax when it has written the codes of LEAD + 1 before
    const int member = blockIdx.x % TEAM, team = blockIdx.x / TEAM, teams = gridDim.x / TEAM, first_row = member * ROWS;
    const int count = team < matrices ? (matrices - team + teams - 1) / teams : 0;  // matrices of this team: team + i * teams
    const int rows = min(ROWS, N - first_row), blocks = rows * BLOCKS;
    auto round = [](int i) { return (u32)(i / SLOTS & 1); };
    if (threadIdx.x < SLOTS) {
        Slot* s = slots + threadIdx.x;
        arrival_init(&s->full, 1), arrival_init(&s->taken, WARPS), arrival_init(&s->known, 32), arrival_init(&s->free, THREADS);
    }
    __syncthreads();

    const int role = (int)threadIdx.x / 32 - WARPS, lane = threadIdx.x % 32;
    if (role >= 0) {
        if (role == 0 && lane) return;
        for (int i = 0; i < count; i++) {
            const int slot = i % SLOTS, matrix = team + i * teams;
            u32* of_team = tops + (size_t)matrix * TEAM;
            if (role == 0) {
                if (i >= SLOTS) arrival_wait(&slots[slot].free, round(i - SLOTS));
                const u32 bytes = (u32)rows * K * 2;
                const u8* from = (const u8*)(x + ((size_t)matrix * N + first_row) * K);
                u8* to = (u8*)(slices + slot * SLICE);
                arrival_expect(&slots[slot].full, bytes);
                for (u32 at = 0; at < bytes; at += COPY) bulk_copy(to + at, from + at, min(COPY, bytes - at), &slots[slot].full);
            } else if (role == 1) {
                arrival_wait(&slots[slot].taken, round(i));
                const u32 top = __reduce_max_sync(0xFFFFFFFFu, lane < WARPS ? warp_top[slot][lane] : 0);
                if (lane == 0) store_relaxed(of_team + member, top | THERE);
            } else {
                const u32 top = highest(of_team, lane);
                const GlobalScale scale = global_scale(magnitude_value(top));
                if (i > LEAD) arrival_wait(&slots[(i - LEAD - 1) % SLOTS].free, round(i - LEAD - 1));  // its table is replaced now
                Scales& known = tables[i % (LEAD + 1)];
                for (int code = lane; code < 128; code += 32) known.factor[code] = block_factor(e4m3_value(code), scale.decode);
                if (lane == 0) {
                    known.mult = __fmul_rn(scale.encode, as_float(0x3E2AAAABu));
                    if (member == 0) global_scales[matrix] = scale.decode;
                }
                arrival_arrive(&slots[slot].known);
            }
        }
        return;
    }

    auto take_amax = [&](int i) {
        const int slot = i % SLOTS;
        arrival_wait(&slots[slot].full, round(i));
        const uint4* from = (const uint4*)(slices + slot * SLICE);
        u32 most = 0;
#pragma unroll 4
        for (int at = threadIdx.x; at < 2 * blocks; at += THREADS) most = larger(most, largest(from[at]));
        most = __reduce_max_sync(0xFFFFFFFFu, folded(most));
        if (lane == 0) {
            warp_top[slot][threadIdx.x / 32] = most;
            arrival_arrive(&slots[slot].taken);
        }
    };
    // Eight lanes read sixteen bytes each at a time: four of them begin with the second half of their block, so that they meet no bank
    // twice.
    const bool second_first = lane & 4;
    const size_t step = (size_t)teams * N * BLOCKS;
    size_t at = ((size_t)team * N + first_row) * BLOCKS + threadIdx.x;  // the first block of this thread in the output
    for (int i = 0; i < LEAD && i < count; i++) take_amax(i);
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        if (i + LEAD < count) take_amax(i + LEAD);
        const int slot = i % SLOTS;
        arrival_wait(&slots[slot].known, round(i));
        const Scales& known = tables[i % (LEAD + 1)];
        const float mult = known.mult;
        const uint4* block_at = (const uint4*)(slices + slot * SLICE) + 2 * threadIdx.x;
        const uint4 *one_half = block_at + second_first, *other_half = block_at + !second_first;
        uint2* code = codes + at;
        u8* scale = scales + at;
        at += step;
#pragma unroll 2
        for (int block = threadIdx.x; block < blocks; block += THREADS) {
            const uint4 a = *one_half, b = *other_half;
            const u32 s = block_scale_code(magnitude_value(folded(larger(largest(a), largest(b)))), mult);
            const float factor = known.factor[s];
            const u32 one = e2m1_word(&a.x, factor), other = e2m1_word(&b.x, factor);
            *code = second_first ? make_uint2(other, one) : make_uint2(one, other);
            *scale = (u8)s;
            one_half += 2 * THREADS, other_half += 2 * THREADS, code += THREADS, scale += THREADS;
        }
        arrival_arrive(&slots[slot].free);
    }
}
