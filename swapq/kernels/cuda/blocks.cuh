// Sixteen BF16 elements in registers.
#pragma once

struct Block { u32 pair[8]; };

DEVICE Block load(const u16* at) {
    const uint4* from = (const uint4*)at;
    uint4 a = from[0], b = from[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

DEVICE u32 block_amax(const Block& x) {
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) top = max_magnitude(top, x.pair[i]);
    return fold_magnitude(top);
}
