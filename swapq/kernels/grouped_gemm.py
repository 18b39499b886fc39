"""Grouped GEMM for many tokens per expert, in Triton: BF16 operands in the tensor core's order, float32 sums, contract epilogue.

It has the sums of ``cuda/grouped_decode.cu`` in the same order, sixteen elements of K after the other into one accumulator, so both give
the same bits on the same GPU (measured, and a test).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from swapq.kernels.cuda.quantize import RowOperand
from swapq.kernels.cuda.tiles import Tiles
from swapq.kernels.tile_rows import tile_rows

__all__ = ["TILE_ROWS", "grouped_gemm"]

TILE_ROWS = 128


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x, x_scale, w, w_scale, w_scale_stride, bias, table, slots, tiles, y, y_stride, rows, top_k,
    N, K,
    SPREAD: tl.constexpr, SORTED: tl.constexpr, DENSE: tl.constexpr, GATED: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    out_width = N // 2 if GATED else N
    blocks = tl.cdiv(out_width, BN)
    tile = tl.program_id(0) // blocks
    if not DENSE:  # noqa: SIM102  Triton would compile both sides of an `and`, and here is no table
        if tile >= tl.load(tiles):
            return
    expert, inside, out_row, row = tile_rows(slots, tiles, tile, rows, top_k, SPREAD, SORTED, DENSE, BM)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    column = n % out_width  # past the end the loads wrap around; the store is masked
    k = tl.arange(0, BK)
    left = x + row[:, None] * K + k[None, :]
    right = w + (expert * N + column)[None, :] * K + k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    acc2 = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, BK):
        a = tl.load(left)
        acc = tl.dot(a, tl.load(right), acc)
        if GATED:
            acc2 = tl.dot(a, tl.load(right + out_width * K), acc2)
        left += BK
        right += BK
    if HAS_SCALE:
        scale = tl.load(w_scale + expert * w_scale_stride)
        if HAS_ROW_SCALE:
            both = tl.load(x_scale + row) * scale
            acc = acc * both[:, None]
            acc2 = acc2 * both[:, None]
        else:
            acc = acc * scale
            acc2 = acc2 * scale
    if HAS_BIAS:
        acc = acc + tl.load(bias + expert * N + column)[None, :]
        if GATED:
            acc2 = acc2 + tl.load(bias + expert * N + out_width + column)[None, :]
    out = acc.to(tl.bfloat16)
    if GATED:
        index = out.to(tl.int16, bitcast=True).to(tl.int32) + 32768
        act = tl.load(table + index).to(tl.float32)
        out = (act * acc2.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)
    tl.store(y + out_row[:, None] * y_stride + n[None, :], out, mask=inside[:, None] & (n < out_width)[None, :])


def grouped_gemm(
    x: RowOperand,
    w: Tensor,
    w_scale: Tensor | None,
    tiles: Tiles,
    *,
    spread: bool,
    in_order: bool = False,
    table: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    config: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """BF16 rows of every slot, ``[R, N]`` or, with ``table``, the gated ``[R, N / 2]``.

    Args:
        x: a row per token (``spread``), or per row of the output.
        in_order: rows come out (and, without ``spread``, come in) in the sorted order of the tiles instead of slot order.
        w: BF16 operand ``[E, N, padded K]``; ``w_scale`` its float32 scale ``[E]`` or ``[E, ...]``, None where it is 1.
        tiles: of ``TILE_ROWS`` slots.
        table, bias: as in :func:`swapq.kernels.cuda.grouped_decode.grouped_decode`.
        out: where to write, rows of any stride; made if it is not given.
        config: columns and K of a tile, warps, stages; for measurements.
    """
    _, n, k = w.shape
    gated = table is not None
    width = n // 2 if gated else n
    if out is None:
        out = torch.empty(tiles.rows, width, dtype=torch.bfloat16, device=x.values.device)
    bn, bk, warps, stages = config or ((128, 32, 8, 4) if gated else (256, 64, 8, 3))
    grid = (tiles.most * triton.cdiv(width, bn),)
    with torch.cuda.device_of(x.values):  # Triton launches on the current device
        _kernel[grid](
            x.values, x.scale, w, w_scale, 0 if w_scale is None else w_scale.stride(0), bias, table, tiles.slots, tiles.table,
            out, out.stride(0), tiles.rows, tiles.top_k, n, k,
            SPREAD=spread, SORTED=in_order, DENSE=tiles.slots is None, GATED=gated,
            HAS_ROW_SCALE=x.scale is not None, HAS_SCALE=w_scale is not None, HAS_BIAS=bias is not None,
            BM=tiles.tokens, BN=bn, BK=bk, num_warps=warps, num_stages=stages, enable_fp_fusion=False,
        )  # fmt: skip
    return out
