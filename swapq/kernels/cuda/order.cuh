// The order in which the tensor core meets the elements of a row.
//
// The decode kernel gives a thread 16 contiguous bytes of codes and feeds four elements of them to one m16n8k16 product; the four threads
// of a row together make its sixteen. An accumulator adds such sixteens one after the other, so two kernels give the same bits when their
// products have the same sixteens in the same order. Operands that are expanded to BF16 in memory are therefore stored in this order:
// within each GROUP (128 elements for NVFP4, 64 for MXFP8) position  q * 32 + h * 16 + t * 4 + j  holds element
// RUN * t + 8 * q + 2 * h + j / 2 + 4 * (j % 2)   with t = 0..3, q = 0..RUN/8 - 1, h = 0..1, j = 0..3 and RUN = GROUP / 4.
// Rows are padded with zeros to a multiple of GROUP.
#pragma once

#ifndef GROUP
#define GROUP 128
#endif
constexpr int RUN = GROUP / 4;
constexpr int PADDED_K = (K + GROUP - 1) / GROUP * GROUP;

DEVICE size_t place_of_eight(int k, int half) {  // of the first of four positions that hold elements k .. k + 7 (k a multiple of 8)
    const int in = k % GROUP, t = in / RUN, q = in % RUN / 8;
    return k - in + q * 32 + half * 16 + t * 4;
}

// Elements k .. k + 7 to their places; ``pair`` makes two of them the operand's 16-bit numbers.
template <typename Pair>
DEVICE void store_eight(u16* row, int k, const float* v, Pair pair) {
#pragma unroll
    for (int half = 0; half < 2; half++)
        *(uint2*)(row + place_of_eight(k, half)) = make_uint2(pair(v[2 * half], v[2 * half + 4]), pair(v[2 * half + 1], v[2 * half + 5]));
}

DEVICE void store_zeros(u16* row, int k) {
#pragma unroll
    for (int half = 0; half < 2; half++) *(uint2*)(row + place_of_eight(k, half)) = make_uint2(0u, 0u);
}
