// A stack of matrices to NVFP4 with one FP32 scale each (contract section 2), read from memory once: matrices wait in the shared memory
// of a team of blocks until their amax is known, while others are on their way.
//
// -D K, N         a matrix is [N, K], contiguous
//    ROWS         rows of a slice: what one block holds of a matrix
//    TEAM         blocks that share a matrix: ceil(N / ROWS)
//    SLOTS        slices that a block holds at a time, of consecutive matrices of its team
//    LEAD         matrices between the amax of one and the codes of another: what hides the wait for the team
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

// A block's share of its team's matrices, counted from 0.
struct Share {
    const u16* x;
    u16* slices;  // [SLOTS][SLICE]
    Arrival* arrival;
    Scope* scopes;
    int team, teams, matrices, first_row, rows;
    __device__ __forceinline__ int matrix(int i) const { return team + i * teams; }
    __device__ __forceinline__ bool has(int i) const { return matrix(i) < matrices; }
    __device__ __forceinline__ const u16* slice(int i) const { return slices + i % SLOTS * SLICE; }

    __device__ __forceinline__ void fetch(int i) const {  // one thread
        const u32 bytes = (u32)rows * K * 2;
        const u8* from = (const u8*)(x + ((size_t)matrix(i) * N + first_row) * K);
        u8* to = (u8*)slice(i);
        arrival_expect(arrival + i % SLOTS, bytes);
        for (u32 at = 0; at < bytes; at += COPY) bulk_copy(to + at, from + at, min(COPY, bytes - at), arrival + i % SLOTS);
    }

    // The slice's largest magnitude, published to the team.
    __device__ __forceinline__ void publish(int i, u32* top) const {
        arrival_wait(arrival + i % SLOTS, i / SLOTS & 1);
        const uint4* from = (const uint4*)slice(i);
        u32 most = 0;
#pragma unroll 4
        for (int at = threadIdx.x; at < 2 * rows * BLOCKS; at += THREADS) {
            const uint4 v = from[at];
            most = max_magnitude(max_magnitude(max_magnitude(max_magnitude(most, v.x), v.y), v.z), v.w);
        }
        most = __reduce_max_sync(0xFFFFFFFFu, fold_magnitude(most));
        if (threadIdx.x % 32 == 0) atomicMax(top, most);
        __syncthreads();
        if (threadIdx.x == 0) {
            Scope* scope = scopes + matrix(i);
            atomicMax(&scope->top, *top);
            __threadfence();
            atomicAdd(&scope->done, 1u);
            *top = 0;
        }
    }

    // The matrix's largest magnitude, once everybody in the team has published; all threads read it after a barrier.
    __device__ __forceinline__ void collect(int i, u32* top) const {
        if (threadIdx.x == 0) {
            const volatile Scope* scope = scopes + matrix(i);
            while (scope->done < TEAM) {}
            __threadfence();
            *top = scope->top;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) quantize_stack(
    const u16* __restrict__ x, int matrices, Scope* scopes, uint2* __restrict__ codes, u8* __restrict__ scales,
    float* __restrict__ global_scales) {
    extern __shared__ __align__(128) u16 slices[];
    __shared__ Arrival arrival[SLOTS];
    __shared__ u32 slice_top, matrix_top;
    const int member = blockIdx.x % TEAM, first_row = member * ROWS;
    const Share share = {x, slices, arrival, scopes, (int)blockIdx.x / TEAM, (int)gridDim.x / TEAM, matrices, first_row, min(ROWS, N - first_row)};
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; slot++) arrival_init(arrival + slot);
        slice_top = 0;
        for (int i = 0; i < SLOTS && share.has(i); i++) share.fetch(i);
    }
    __syncthreads();
    for (int i = 0; i < LEAD && share.has(i); i++) {
        share.publish(i, &slice_top);
        __syncthreads();
    }
#pragma unroll 1
    for (int i = 0; share.has(i); i++) {
        if (share.has(i + LEAD)) share.publish(i + LEAD, &slice_top);
        share.collect(i, &matrix_top);
        __syncthreads();
        const int matrix = share.matrix(i);
        const GlobalScale scale = global_scale(magnitude_value(matrix_top));
        if (member == 0 && threadIdx.x == 0) global_scales[matrix] = scale.decode;
        const float mult = __fmul_rn(scale.encode, as_float(0x3E2AAAABu));
        const size_t out = ((size_t)matrix * N + first_row) * BLOCKS;
#pragma unroll 2
        for (int block = threadIdx.x; block < share.rows * BLOCKS; block += THREADS) {
            const Block b = load_shared(share.slice(i) + block * 16);
            const u32 s = block_scale_code(magnitude_value(block_amax(b)), mult) & 0xFFu;
            const float factor = block_factor(e4m3_value(s), scale.decode);
            codes[out + block] = make_uint2(e2m1_word(b.pair, factor), e2m1_word(b.pair + 4, factor));
            scales[out + block] = (u8)s;
        }
        __syncthreads();  // everybody has read the slice and the amax
        if (threadIdx.x == 0 && share.has(i + SLOTS)) share.fetch(i + SLOTS);
    }
}
