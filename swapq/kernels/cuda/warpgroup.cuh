// Products of four warps with a tile of tokens in shared memory (wgmma, sm_90a): each warp brings 16 weight rows in registers, as for
// m16n8k16, and the tensor core reads the tokens itself. The sums are those of tensor_core.cuh bit for bit (a test compares both).
#pragma once

#if NVFP4
#define WARPGROUP_TYPES ".f32.f16.f16 "
#else
#define WARPGROUP_TYPES ".f32.bf16.bf16 "
#endif

// A tile of 8 * WIDE tokens in shared memory: columns of eight elements of K, 16 bytes a token and 16 more, so that writers meet other banks.
template <int WIDE>
struct Columns {
    static constexpr u32 UNITS = 8 * WIDE + 1, BYTES = 16 * UNITS;
    // What the tensor core is told: where the first column begins, and the strides in K (a column) and in tokens (eight units).
    static __device__ __forceinline__ u64 descriptor(const u8* tile) {
        return (u64)(shared_address(tile) >> 4 & 0x3FFFu) | (u64)UNITS << 16 | (u64)8 << 32;
    }
    static constexpr u64 SIXTEEN = 2 * UNITS;  // from the sixteen elements of one product to the next
};

DEVICE void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// The products are done, and what they read may be overwritten.
DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// What threads have written to shared memory is seen by the tensor core.
DEVICE void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define SUM(n) "+f"(acc[n][0]), "+f"(acc[n][1]), "+f"(acc[n][2]), "+f"(acc[n][3])
#define PRODUCT_OF(N, SUMS, A0, A1, A2, A3, B)                                                                                   \
    "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"                                                                               \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16" WARPGROUP_TYPES "{" SUMS "}, {" A0 "," A1 "," A2 "," A3 "}, " B ", add, 1, 1, 0;\n}"
#define LEFT "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
#define S4(a, b, c, d) "%" #a ",%" #b ",%" #c ",%" #d
#define SUMS_8 S4(0, 1, 2, 3)
#define SUMS_16 SUMS_8 "," S4(4, 5, 6, 7)
#define SUMS_24 SUMS_16 "," S4(8, 9, 10, 11)
#define SUMS_32 SUMS_24 "," S4(12, 13, 14, 15)
#define SUMS_48 SUMS_32 "," S4(16, 17, 18, 19) "," S4(20, 21, 22, 23)
#define SUMS_64 SUMS_48 "," S4(24, 25, 26, 27) "," S4(28, 29, 30, 31)

template <int WIDE>
DEVICE void multiply_add(float (&acc)[WIDE][4], const u32 (&a)[4], u64 b) {
    static_assert(WIDE <= 4 || WIDE == 6 || WIDE == 8, "no product of this width is written out");
    if constexpr (WIDE == 1)
        asm volatile(PRODUCT_OF(8, SUMS_8, "%4", "%5", "%6", "%7", "%8") : SUM(0) : LEFT);
    else if constexpr (WIDE == 2)
        asm volatile(PRODUCT_OF(16, SUMS_16, "%8", "%9", "%10", "%11", "%12") : SUM(0), SUM(1) : LEFT);
    else if constexpr (WIDE == 3)
        asm volatile(PRODUCT_OF(24, SUMS_24, "%12", "%13", "%14", "%15", "%16") : SUM(0), SUM(1), SUM(2) : LEFT);
    else if constexpr (WIDE == 4)
        asm volatile(PRODUCT_OF(32, SUMS_32, "%16", "%17", "%18", "%19", "%20") : SUM(0), SUM(1), SUM(2), SUM(3) : LEFT);
    else if constexpr (WIDE == 6)
        asm volatile(PRODUCT_OF(48, SUMS_48, "%24", "%25", "%26", "%27", "%28")
                     : SUM(0), SUM(1), SUM(2), SUM(3), SUM(4), SUM(5) : LEFT);
    else
        asm volatile(PRODUCT_OF(64, SUMS_64, "%32", "%33", "%34", "%35", "%36")
                     : SUM(0), SUM(1), SUM(2), SUM(3), SUM(4), SUM(5), SUM(6), SUM(7) : LEFT);
}

#undef SUM
#undef LEFT
#undef S4
