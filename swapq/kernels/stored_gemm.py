"""Grouped GEMM over stored codes of formats whose scales change along K, in Triton: FP8 block and INT4 (contract section 7).

    fp8_block   y = sum over 128-long slices of K, ascending, of  f32(x_codes @ w_codes.T) * f32(s_x * s_w)
    int4        y = x @ bf16(code * s).T, even elements of K in front of odd ones within each BK

Few rows go through narrow tiles with the weights as the left operand, many through wide ones. All shapes that are chosen take the same
sixteens of K in the same order (benchmarks.hopper.stored_shapes compares their bits), so a row's bits depend on nothing but the row and the
weights, in the trainer and in the engine. Sums are float32 where the reference's are rounded from float64: equal to it up to their order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from swapq.formats import Operand
from swapq.kernels.cuda.tiles import Tiles
from swapq.kernels.tile_rows import tile_rows

__all__ = ["Shape", "stored_gemm"]

_SLICE = 128


class Shape(NamedTuple):
    """How a block works. ``left``: weights are the left operand of the product, which few rows waste less of."""

    columns: int = 128
    warps: int = 8
    stages: int = 3
    left: bool = False


def _shape(int4: bool, slots: int) -> Shape:
    """What was fastest on an H200 for tiles of so many slots. No result depends on it."""
    if int4:
        return Shape(128, 8, 3, left=slots < 128)
    return Shape(128 if slots == 16 else 64, 4, 3, left=True)


@triton.jit
def _int4_values(both):
    """``((byte & 15) ^ 8) - 8`` and ``((byte >> 4) ^ 8) - 8`` as BF16: two's complement codes in low and high nibbles.

    A GPU converts integers slowly. So a code with its sign bit turned over, 0 to 15, is put below the exponent of 128, where BF16 counts
    in ones, and 136 is taken away.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, ones;
        mov.b32 ones, 0x43084308;
        lop3.b32 low, $4, 0x0F0F0F0F, 0x08080808, 0x6A;
        shr.b32 high, $4, 4;
        lop3.b32 high, high, 0x0F0F0F0F, 0x08080808, 0x6A;
        prmt.b32 $0, low, 0x43434343, 0x4140;
        prmt.b32 $1, low, 0x43434343, 0x4342;
        prmt.b32 $2, high, 0x43434343, 0x4140;
        prmt.b32 $3, high, 0x43434343, 0x4342;
        sub.rn.bf16x2 $0, $0, ones;
        sub.rn.bf16x2 $1, $1, ones;
        sub.rn.bf16x2 $2, $2, ones;
        sub.rn.bf16x2 $3, $3, ones;
        }
        """,
        "=r,=r,=r,=r,r",
        [both],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x, x_scale, codes, scales, scale_row, bias, slots, tiles, y, rows, top_k,
    N, K, BLOCKS, SCALE_ROWS,
    INT4: tl.constexpr, SPREAD: tl.constexpr, SORTED: tl.constexpr, DENSE: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr,
    LEFT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(N, BN)
    tile = tl.program_id(0) // blocks
    if not DENSE:  # noqa: SIM102  Triton would compile both sides of an `and`, and here is no table
        if tile >= tl.load(tiles):
            return
    expert, inside, out_row, row = tile_rows(slots, tiles, tile, rows, top_k, SPREAD, SORTED, DENSE, BM)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    column = n % N  # past the end the loads wrap around; the store is masked
    line = expert * N + column
    acc = tl.zeros((BN, BM) if LEFT else (BM, BN), tl.float32)
    if INT4:
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)
            pairs = tl.load(x + row[:, None] * K + k[None, :], mask=(k < K)[None, :], other=0.0)
            even, odd = tl.split(tl.reshape(pairs, (BM, BK // 2, 2)))
            byte = start // 2 + tl.arange(0, BK // 2)
            here = byte < K // 2
            # one scale for all of BK, or some
            block = (start // GROUP + tl.arange(0, 1)) if GROUP % BK == 0 else byte // (GROUP // 2)
            if LEFT:
                both = tl.load(codes + line[:, None] * (K // 2) + byte[None, :], mask=here[None, :], other=0)
                scale = tl.load(
                    scales + line[:, None] * BLOCKS + block[None, :], mask=(block < BLOCKS)[None, :], other=0.0
                )
            else:
                both = tl.load(codes + line[None, :] * (K // 2) + byte[:, None], mask=here[:, None], other=0)
                scale = tl.load(
                    scales + line[None, :] * BLOCKS + block[:, None], mask=(block < BLOCKS)[:, None], other=0.0
                )
            low, high = _int4_values(both)
            low = (low.to(tl.float32) * scale.to(tl.float32)).to(tl.bfloat16)
            high = (high.to(tl.float32) * scale.to(tl.float32)).to(tl.bfloat16)
            if LEFT:
                acc = tl.dot(low, tl.trans(even), acc)
                acc = tl.dot(high, tl.trans(odd), acc)
            else:
                acc = tl.dot(even, low, acc)
                acc = tl.dot(odd, high, acc)
    else:
        w_row = expert * SCALE_ROWS + tl.load(scale_row + column).to(tl.int64)
        for block in range(BLOCKS):
            k = block * BK + tl.arange(0, BK)
            here = k < K
            a = tl.load(x + row[:, None] * K + k[None, :], mask=here[None, :], other=0.0)
            if LEFT:
                bits = tl.load(codes + line[:, None] * K + k[None, :], mask=here[None, :], other=0)
            else:
                bits = tl.load(codes + line[None, :] * K + k[:, None], mask=here[:, None], other=0)
            w = bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
            s_x = tl.load(x_scale + row * BLOCKS + block)
            s_w = tl.load(scales + w_row * BLOCKS + block)
            if LEFT:
                acc = acc + tl.dot(w, tl.trans(a)) * (s_w[:, None] * s_x[None, :])
            else:
                acc = acc + tl.dot(a, w) * (s_x[:, None] * s_w[None, :])
    if LEFT:
        acc = tl.trans(acc)
    if HAS_BIAS:
        acc = acc + tl.load(bias + expert * N + column)[None, :]
    tl.store(y + out_row[:, None] * N + n[None, :], acc.to(tl.bfloat16), mask=inside[:, None] & (n < N)[None, :])


def stored_gemm(
    x: Operand,
    codes: Tensor,
    scales: Tensor,
    tiles: Tiles,
    *,
    spread: bool,
    group: int = 0,
    scale_row: Tensor | None = None,
    in_order: bool = False,
    bias: Tensor | None = None,
    shape: Shape | None = None,
) -> Tensor:
    """BF16 rows of every slot, ``[R, N]``; rows of slots that are not here are not written.

    Args:
        x: values ``[M, K]``, a row per token (``spread``) or per row of the output: FP16, which holds E4M3 exactly, with float32 scale
            ``[M, ceil(K/128)]``; BF16 without scale beside INT4.
        codes: uint8 ``[E, N, K]``, E4M3 bits; or ``[E, N, K/2]``, two INT4 codes a byte.
        scales: float32 ``[E, S, ceil(K/128)]``; or BF16 ``[E, N, K/group]``.
        tiles: of :func:`swapq.kernels.stored.tile_slots` slots.
        group: elements that share a scale of INT4; 0 says that the codes are E4M3.
        scale_row: int32 ``[N]``, row of ``scales`` of each row of the weight (E4M3).
        in_order: as in :func:`swapq.kernels.grouped_gemm.grouped_gemm`.
        bias: float32 ``[E, N]`` or None.
        shape: for measurements; chosen if it is not given.
    """
    shape = shape or _shape(group > 0, tiles.tokens)
    n, k = codes.shape[1], x.values.shape[1]
    out = torch.empty(tiles.rows, n, dtype=torch.bfloat16, device=codes.device)
    grid = (tiles.most * triton.cdiv(n, shape.columns),)
    with torch.cuda.device_of(codes):  # Triton launches on the current device
        _kernel[grid](
            x.values, x.scale, codes, scales, scale_row, bias, tiles.slots, tiles.table, out, tiles.rows, tiles.top_k,
            n, k, scales.shape[-1], scales.shape[-2],
            INT4=group > 0, SPREAD=spread, SORTED=in_order, DENSE=tiles.slots is None, HAS_BIAS=bias is not None, GROUP=group,
            LEFT=shape.left, BM=tiles.tokens, BN=shape.columns, BK=_SLICE, num_warps=shape.warps, num_stages=shape.stages,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
