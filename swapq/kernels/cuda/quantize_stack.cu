// A stack of matrices to NVFP4 with one FP32 scale each (contract section 2), read from memory once: a matrix waits in the shared memory
// of a team of blocks until its amax is known, and the next matrix is on its way meanwhile.
//
// -D K, N         a matrix is [N, K], contiguous
//    ROWS         rows of a slice: what one block holds of a matrix
//    TEAM         blocks that share a matrix: ceil(N / ROWS)
//    THREADS
// All blocks of the grid must be on the GPU at once (cooperative launch): a team waits for its own members.
#include "contract.cuh"
#include "blocks.cuh"
#include "bulk_copy.cuh"

constexpr int BLOCKS = K / 16, SLICE = ROWS * K;  // elements
constexpr u32 COPY = 16384;                       // bytes of one copy at most

struct Scope { u32 top, done; };

// A lane's 32 bytes. Eight lanes read sixteen bytes each at a time, half of them their second sixteen first, so that they meet no bank twice.
DEVICE Block load_shared(const u16* at) {
    const bool second = threadIdx.x & 4;
    const uint4* from = (const uint4*)at;
    const uint4 a = from[second], b = from[!second];
    return {{second ? b.x : a.x, second ? b.y : a.y, second ? b.z : a.z, second ? b.w : a.w, second ? a.x : b.x, second ? a.y : b.y,
             second ? a.z : b.z, second ? a.w : b.w}};
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize_stack(
    const u16* __restrict__ x, int matrices, Scope* scopes, uint2* __restrict__ codes, u8* __restrict__ scales,
    float* __restrict__ global_scales) {
    extern __shared__ __align__(128) u16 slices[];  // [2][SLICE]
    __shared__ Arrival arrival[2];
    __shared__ u32 top;
    const int member = blockIdx.x % TEAM, teams = gridDim.x / TEAM;
    const int first_row = member * ROWS, rows = min(ROWS, N - first_row);
    const u32 bytes = (u32)rows * K * 2;
    const int blocks = rows * BLOCKS;
    auto fetch = [&](int matrix, int slot) {  // one thread
        arrival_expect(arrival + slot, bytes);
        const u8* from = (const u8*)(x + ((size_t)matrix * N + first_row) * K);
        u8* to = (u8*)(slices + slot * SLICE);
        for (u32 at = 0; at < bytes; at += COPY) bulk_copy(to + at, from + at, min(COPY, bytes - at), arrival + slot);
    };
    int matrix = blockIdx.x / TEAM;
    if (threadIdx.x == 0) {
        arrival_init(arrival);
        arrival_init(arrival + 1);
        top = 0;
        if (matrix < matrices) fetch(matrix, 0);
        if (matrix + teams < matrices) fetch(matrix + teams, 1);
    }
    __syncthreads();
    u32 phase = 0;
#pragma unroll 1
    for (int slot = 0; matrix < matrices; matrix += teams) {
        const u16* slice = slices + slot * SLICE;
        arrival_wait(arrival + slot, phase);
        u32 most = 0;
#pragma unroll 4
        for (int i = threadIdx.x; i < 2 * blocks; i += THREADS) {
            const uint4 v = ((const uint4*)slice)[i];
            most = max_magnitude(max_magnitude(max_magnitude(max_magnitude(most, v.x), v.y), v.z), v.w);
        }
        most = __reduce_max_sync(0xFFFFFFFFu, fold_magnitude(most));
        if (threadIdx.x % 32 == 0) atomicMax(&top, most);
        __syncthreads();
        Scope* scope = scopes + matrix;
        if (threadIdx.x == 0) {
            atomicMax(&scope->top, top);
            __threadfence();
            atomicAdd(&scope->done, 1u);
            while (*(volatile u32*)&scope->done < TEAM) {}
            __threadfence();
            top = *(volatile u32*)&scope->top;
        }
        __syncthreads();
        const GlobalScale scale = global_scale(magnitude_value(top));
        if (member == 0 && threadIdx.x == 0) global_scales[matrix] = scale.decode;
        const float mult = __fmul_rn(scale.encode, as_float(0x3E2AAAABu));
        const size_t out = ((size_t)matrix * N + first_row) * BLOCKS;
#pragma unroll 2
        for (int block = threadIdx.x; block < blocks; block += THREADS) {
            const Block b = load_shared(slice + block * 16);
            const u32 s = block_scale_code(magnitude_value(block_amax(b)), mult) & 0xFFu;
            const float factor = block_factor(e4m3_value(s), scale.decode);
            codes[out + block] = make_uint2(e2m1_word(b.pair, factor), e2m1_word(b.pair + 4, factor));
            scales[out + block] = (u8)s;
        }
        __syncthreads();  // everybody has read the slice and the amax
        if (threadIdx.x == 0) {
            top = 0;
            if (matrix + 2 * teams < matrices) fetch(matrix + 2 * teams, slot);
        }
        __syncthreads();
        phase ^= (u32)slot;
        slot ^= 1;
    }
}
