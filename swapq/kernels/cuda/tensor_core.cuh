// One m16n8k16 product with float32 sums: FP16 pairs for NVFP4, BF16 pairs for MXFP8.
#pragma once

#if NVFP4
#define PRODUCT "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#else
#define PRODUCT "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif

DEVICE void multiply_add(float* acc, const u32* a, const u32* b) {
    asm volatile(PRODUCT "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
