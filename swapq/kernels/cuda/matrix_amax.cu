// Largest magnitude of each matrix of a stack, as BF16 bits: integers, so that NaN is above Inf and the order of the maxima is free.
// -D THREADS. Grid: pieces of a matrix, matrices.
#include "contract.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) matrix_amax(const uint4* __restrict__ x, int eights, u32* __restrict__ top) {
    const uint4* matrix = x + (size_t)blockIdx.y * eights;
    u32 most = 0;
#pragma unroll 4
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < eights; i += gridDim.x * THREADS) {
        const uint4 v = matrix[i];
        most = max_magnitude(max_magnitude(max_magnitude(max_magnitude(most, v.x), v.y), v.z), v.w);
    }
    most = fold_magnitude(most);
    most = __reduce_max_sync(0xFFFFFFFFu, most);
    if (threadIdx.x % 32 == 0) atomicMax(&top[blockIdx.y], most);
}
