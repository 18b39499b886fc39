// A stack of matrices to NVFP4 with one FP32 scale each (contract section 2), read from memory once: matrices wait in the shared memory
// of a team of blocks until their amax is known, while others are on their way.
//
// WARPS warps compute; three more serve them, so that no computing warp ever waits for memory or for the team while there is work: one
// fetches slices, one publishes the amax of a slice to the team, one collects the amax of a matrix. They meet at barriers in shared memory.
//
// -D K, N         a matrix is [N, K], contiguous
//    ROWS         rows of a slice: what one block holds of a matrix
//    TEAM         blocks that share a matrix: ceil(N / ROWS)
//    SLOTS        slices that a block holds at a time, of consecutive matrices of its team
//    LEAD         matrices between the amax of one and the codes of another, less than SLOTS: what hides the wait for the team
//    WARPS
// All blocks of the grid must be on the GPU at once (cooperative launch): a team waits for its own members. Two share a multiprocessor.
#include "contract.cuh"
#include "blocks.cuh"
#include "bulk_copy.cuh"

constexpr int BLOCKS = K / 16, SLICE = ROWS * K;  // elements
constexpr int THREADS = 32 * WARPS;               // that compute
constexpr u32 COPY = 16384;                       // bytes of one copy at most

struct Scope { u32 top, done; };

// A slot's barriers: its slice is here; every warp has its amax; the matrix's amax is here; every warp has written its codes.
struct Slot { Arrival full, taken, known, free; };

// A lane's 32 bytes. Eight lanes read sixteen bytes each at a time, half of them their second sixteen first, so that they meet no bank twice.
DEVICE Block load_shared(const u16* at) {
    const bool second = threadIdx.x & 4;
    const uint4* from = (const uint4*)at;
    const uint4 a = from[second], b = from[!second];
    return {{second ? b.x : a.x, second ? b.y : a.y, second ? b.z : a.z, second ? b.w : a.w, second ? a.x : b.x, second ? a.y : b.y,
             second ? a.z : b.z, second ? a.w : b.w}};
}

extern "C" __global__ void __launch_bounds__(THREADS + 96, 2) quantize_stack(
    const u16* __restrict__ x, int matrices, Scope* scopes, uint2* __restrict__ codes, u8* __restrict__ scales,
    float* __restrict__ global_scales) {
    extern __shared__ __align__(128) u16 slices[];  // [SLOTS][SLICE]
    __shared__ Slot slots[SLOTS];
    __shared__ u32 slice_top[SLOTS], matrix_top[SLOTS];
    const int member = blockIdx.x % TEAM, team = blockIdx.x / TEAM, teams = gridDim.x / TEAM, first_row = member * ROWS;
    const int count = team < matrices ? (matrices - team + teams - 1) / teams : 0;  // matrices of this team: team + i * teams
    const int rows = min(ROWS, N - first_row), blocks = rows * BLOCKS;
    auto round = [](int i) { return (u32)(i / SLOTS & 1); };
    if (threadIdx.x < SLOTS) {
        Slot* s = slots + threadIdx.x;
        arrival_init(&s->full, 1), arrival_init(&s->taken, WARPS), arrival_init(&s->known, 1), arrival_init(&s->free, WARPS);
        slice_top[threadIdx.x] = 0;
    }
    __syncthreads();

    const int role = (int)threadIdx.x / 32 - WARPS;
    if (role >= 0) {
        if (threadIdx.x % 32) return;
        for (int i = 0; i < count; i++) {
            const int slot = i % SLOTS, matrix = team + i * teams;
            Scope* scope = scopes + matrix;
            if (role == 0) {
                if (i >= SLOTS) arrival_wait(&slots[slot].free, round(i - SLOTS));
                const u32 bytes = (u32)rows * K * 2;
                const u8* from = (const u8*)(x + ((size_t)matrix * N + first_row) * K);
                u8* to = (u8*)(slices + slot * SLICE);
                arrival_expect(&slots[slot].full, bytes);
                for (u32 at = 0; at < bytes; at += COPY) bulk_copy(to + at, from + at, min(COPY, bytes - at), &slots[slot].full);
            } else if (role == 1) {
                arrival_wait(&slots[slot].taken, round(i));
                atomicMax(&scope->top, slice_top[slot]);
                slice_top[slot] = 0;
                __threadfence();
                atomicAdd(&scope->done, 1u);
            } else {
                while (*(volatile u32*)&scope->done < TEAM) {}
                __threadfence();
                const u32 top = *(volatile u32*)&scope->top;
                matrix_top[slot] = top;
                if (member == 0) global_scales[matrix] = global_scale(magnitude_value(top)).decode;
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
        for (int at = threadIdx.x; at < 2 * blocks; at += THREADS) {
            const uint4 v = from[at];
            most = max_magnitude(max_magnitude(max_magnitude(max_magnitude(most, v.x), v.y), v.z), v.w);
        }
        most = __reduce_max_sync(0xFFFFFFFFu, fold_magnitude(most));
        if (threadIdx.x % 32 == 0) {
            atomicMax(slice_top + slot, most);
            arrival_arrive(&slots[slot].taken);
        }
    };
    for (int i = 0; i < LEAD && i < count; i++) take_amax(i);
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        if (i + LEAD < count) take_amax(i + LEAD);
        const int slot = i % SLOTS;
        arrival_wait(&slots[slot].known, round(i));
        const GlobalScale scale = global_scale(magnitude_value(matrix_top[slot]));
        const float mult = __fmul_rn(scale.encode, as_float(0x3E2AAAABu));
        const u16* slice = slices + slot * SLICE;
        const size_t out = ((size_t)(team + i * teams) * N + first_row) * BLOCKS;
#pragma unroll 2
        for (int block = threadIdx.x; block < blocks; block += THREADS) {
            const Block b = load_shared(slice + block * 16);
            const u32 s = block_scale_code(magnitude_value(block_amax(b)), mult) & 0xFFu;
            const float factor = block_factor(e4m3_value(s), scale.decode);
            codes[out + block] = make_uint2(e2m1_word(b.pair, factor), e2m1_word(b.pair + 4, factor));
            scales[out + block] = (u8)s;
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrival_arrive(&slots[slot].free);
    }
}
