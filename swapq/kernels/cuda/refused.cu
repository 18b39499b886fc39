// Which of many tensors hold a refused number (kernels/refused.py). Of each the table has the address, the number of bytes, what is refused,
// and the number of pieces before its own: none of an empty tensor. Grid: the pieces of all tensors.
// -D THREADS, ROUNDS (reads of 16 bytes that a thread makes in a piece).
#include "contract.cuh"

enum Kind { BF16, FLOAT32, E4M3, E4M3_SCALE, E8M0, FLOAT32_SCALE };  // the order of refused.py

// Not 0 if a number in the word is refused. What is added to a number without its top bit sets that bit where the rest is too large.
template <int KIND>
DEVICE u32 refused(u32 w) {
    if (KIND == BF16) return ((w & 0x7FFF7FFFu) + 0x00800080u) & 0x80008000u;
    if (KIND == FLOAT32) return ((w & 0x7FFFFFFFu) + 0x00808000u) & 0x80000000u;  // Inf after rounding to BF16
    if (KIND == FLOAT32_SCALE) return w - 1 >= 0x7F7FFFFFu;                       // not above 0 and finite
    const u32 full = (w & 0x7F7F7F7Fu) + 0x01010101u;
    return (KIND == E4M3 ? full : KIND == E4M3_SCALE ? full | w : full & w) & 0x80808080u;
}

template <int KIND>
DEVICE bool any_refused(const u8* bytes, u64 size, u64 piece) {
    const uint4* vectors = (const uint4*)bytes;
    const u64 count = size / 16, first = piece * ROUNDS * THREADS + threadIdx.x;
    u32 found = 0;
#pragma unroll 4
    for (int i = 0; i < ROUNDS; i++) {
        const u64 at = first + i * THREADS;
        if (at < count) {
            const uint4 v = vectors[at];
            found |= refused<KIND>(v.x) | refused<KIND>(v.y) | refused<KIND>(v.z) | refused<KIND>(v.w);
        }
    }
    const u32 begin = threadIdx.x * 4, rest = size % 16;  // the last bytes, which fill no vector
    if (begin < rest && count < (piece + 1) * ROUNDS * THREADS) {
        u32 word = 0;  // zeros fill up what has less than four bytes: no number of those sizes is refused for being 0
        for (u32 i = begin; i < rest && i < begin + 4; i++) word |= (u32)bytes[count * 16 + i] << 8 * (i - begin);
        found |= refused<KIND>(word);
    }
    return found;
}

DEVICE bool any_refused_of(int kind, const u8* bytes, u64 size, u64 piece) {
    switch (kind) {
        case BF16: return any_refused<BF16>(bytes, size, piece);
        case FLOAT32: return any_refused<FLOAT32>(bytes, size, piece);
        case E4M3: return any_refused<E4M3>(bytes, size, piece);
        case E4M3_SCALE: return any_refused<E4M3_SCALE>(bytes, size, piece);
        case E8M0: return any_refused<E8M0>(bytes, size, piece);
        default: return any_refused<FLOAT32_SCALE>(bytes, size, piece);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) refused(const u64* __restrict__ table, int count, u8* __restrict__ found) {
    int tensor = 0;  // the last with no more pieces before it than this block
    for (int end = count; end - tensor > 1;) {
        const int middle = (tensor + end) / 2;
        if (table[4 * middle + 3] <= blockIdx.x) tensor = middle;
        else end = middle;
    }
    const u64* row = table + 4 * tensor;
    if (any_refused_of((int)row[2], (const u8*)row[0], row[1], blockIdx.x - row[3])) found[tensor] = 1;
}
