// A stack of matrices to NVFP4 with one FP32 scale each (contract section 2), read from memory once: the amax of a matrix is taken LAG
// matrices ahead of its codes, so that the second look at it finds it in the level-2 cache.
//
// -D K, N         a matrix is [N, K]
//    LANES        lanes that share a row
//    PIECES       blocks that take one amax
//    LAG, THREADS
// Blocks start in the order of their index, and a block of codes waits only for blocks of amax with a lower one.
#include "contract.cuh"
#include "blocks.cuh"

constexpr int BLOCKS = K / 16, ROWS = THREADS / LANES, ROW_BLOCKS = (N + ROWS - 1) / ROWS, PERIOD = PIECES + ROW_BLOCKS;

struct Scope { u32 top, done; };

DEVICE void take_amax(const u16* matrix, int piece, Scope* scope) {
    const uint4* x = (const uint4*)matrix;
    u32 most = 0;
#pragma unroll 4
    for (int i = piece * THREADS + threadIdx.x; i < N * (K / 8); i += PIECES * THREADS) {
        const uint4 v = x[i];
        most = max_magnitude(max_magnitude(max_magnitude(max_magnitude(most, v.x), v.y), v.z), v.w);
    }
    most = __reduce_max_sync(0xFFFFFFFFu, fold_magnitude(most));
    if (threadIdx.x % 32 == 0) atomicMax(&scope->top, most);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(&scope->done, 1u);
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize_stack(
    const u16* __restrict__ x, int matrices, Scope* scopes, uint2* __restrict__ codes, u8* __restrict__ scales,
    float* __restrict__ global_scales) {
    const int period = blockIdx.x / PERIOD, at = blockIdx.x % PERIOD;
    if (at < PIECES) {
        if (period < matrices) take_amax(x + (size_t)period * N * K, at, scopes + period);
        return;
    }
    const int matrix = period - LAG;
    if (matrix < 0) return;
    volatile Scope* scope = scopes + matrix;
    if (threadIdx.x == 0)
        while (scope->done < PIECES) __nanosleep(100);
    __syncthreads();
    __threadfence();
    const GlobalScale scale = global_scale(magnitude_value(scope->top));
    if (at == PIECES && threadIdx.x == 0) global_scales[matrix] = scale.decode;
    const float mult = __fmul_rn(scale.encode, as_float(0x3E2AAAABu));
    const int row_here = (at - PIECES) * ROWS + threadIdx.x / LANES;
    if (row_here >= N) return;
    const size_t row = (size_t)matrix * N + row_here;
#pragma unroll 2
    for (int block = threadIdx.x % LANES; block < BLOCKS; block += LANES) {
        const Block b = load(x + row * K + block * 16);
        const u32 s = block_scale_code(magnitude_value(block_amax(b)), mult) & 0xFFu;
        const float factor = block_factor(e4m3_value(s), scale.decode);
        codes[row * BLOCKS + block] = make_uint2(e2m1_word(b.pair, factor), e2m1_word(b.pair + 4, factor));
        scales[row * BLOCKS + block] = (u8)s;
    }
}
