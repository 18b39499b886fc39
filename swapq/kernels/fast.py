"""The expert block and the linear on a GPU: which kernels run them, for the trainer and for the engine.

FP8 block and INT4 go to ``stored``. NVFP4 and MXFP8 stay here, where every path adds the products of a row in one order (cuda/order.cuh):
many tokens per expert go through weights expanded once and a Triton GEMM, few through codes expanded in registers, and the trainer's rows
equal the engine's.
"""

import torch
from torch import Tensor

from swapq import formats
from swapq.errors import SwapqError
from swapq.formats import Parts
from swapq.kernels import stored
from swapq.kernels.cuda import grouped_decode as decode
from swapq.kernels.cuda.elementwise import combine
from swapq.kernels.cuda.quantize import GROUPS, RowOperand, aligned, expand, length, padded, row_operand
from swapq.kernels.cuda.tiles import Tiles, dense_tiles, route, tiles_of
from swapq.kernels.routing import Routing

__all__ = ["dense_linear", "fits", "routed_rows", "stored_block"]

#: mean rows of an expert up to which codes are expanded in registers
_FEW = 64
#: of a single matrix expanded at a time
_PIECE_BYTES = 8 << 20


def fits(fmt: str, n: int, k: int) -> bool:
    """Whether the kernels take a matrix ``[N, K]``. NVFP4 and MXFP8 want rows in 16-byte pieces, gate and up in tiles of 16 rows."""
    return (k % 32 == 0 and n % 32 == 0) if fmt in GROUPS else stored.fits(fmt, n, k)


def routed_rows(
    x: Tensor, w: Parts, fmt: str, scope: str, bias: Tensor | None, routing: Routing, *, gather: bool
) -> Tensor:
    """BF16 rows ``[R, N]`` in routed order from BF16 ``x``: tokens ``[T, K]`` if ``gather``, else rows ``[R, K]``."""
    _require_width(x, w, fmt)
    if fmt not in GROUPS:
        return stored.routed_rows(x, w, fmt, scope, bias, routing, gather=gather)
    from swapq.kernels.grouped_gemm import TILE_ROWS

    tiles = tiles_of(routing, TILE_ROWS)
    return _expanded(row_operand(x, fmt), w, fmt, tiles, spread=gather, in_order=True, bias=stored.epilogue_bias(bias))


def dense_linear(x: Tensor, w: Parts, fmt: str, bias: Tensor | None, *, scope: str | None = None) -> Tensor:
    """BF16 ``[..., N]`` of ``x [..., K]`` through one stored matrix ``[N, K]``; ``bias [N]``."""
    _require_width(x, w, fmt)
    if fmt not in GROUPS:
        return stored.dense_linear(x, w, fmt, bias, scope=scope)
    rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    one = Parts(w.codes[None], w.scales[None], None if w.global_scale is None else w.global_scale.reshape(1))
    return _dense_rows(rows, one, fmt, None if bias is None else bias[None]).view(*x.shape[:-1], w.codes.shape[0])


def _dense_rows(x: Tensor, w: Parts, fmt: str, bias: Tensor | None) -> Tensor:
    rows, n = x.shape[0], w.codes.shape[1]
    few = rows <= 4 * _FEW
    tiles = dense_tiles(rows, decode.dense_tile_tokens(rows, n) if few else 128)
    return _product(row_operand(x, fmt), w, fmt, tiles, few=few, spread=False, bias=stored.epilogue_bias(bias))


def stored_block(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Parts,
    down: Parts,
    fmt: str,
    table: Tensor,
    *,
    scope: str | None = None,
    local_of: Tensor | None = None,
) -> Tensor:
    """The block of contract section 4 over stored codes: BF16 ``[T, H]`` from BF16 ``x [T, H]``. No value is read on the host.

    Args:
        ids, weights: int32 or int64 and float32 ``[T, k]``.
        gate_up, down: stored weights ``[E, 2I, H]`` and ``[E, H, I]``.
        table: BF16 ``[65536]``, the activation of every BF16 number.
        scope: of ``gate_up``, where it is not the format's default.
        local_of: local id of each global id; None where ids are local.
    """
    _require_width(x, gate_up, fmt)
    x = aligned(x)  # a copy made later would stand between the two kernels that run beside each other
    if fmt not in GROUPS:
        return stored.stored_block(x, ids, weights, gate_up, down, fmt, table, scope=scope, local_of=local_of)
    experts = gate_up.codes.shape[0]
    few = ids.numel() <= _FEW * experts
    tiles = route(ids, experts, decode.tile_tokens(ids.numel(), experts) if few else 128, local_of=local_of)
    h = _product(row_operand(x, fmt, beside=True), gate_up, fmt, tiles, few=few, spread=True, table=table)
    y = _product(row_operand(h, fmt), down, fmt, tiles, few=few, spread=False)
    return combine(y, weights, ids.shape[1], ids=ids, experts=experts, local_of=local_of)


def _product(
    x: RowOperand,
    w: Parts,
    fmt: str,
    tiles: Tiles,
    *,
    few: bool,
    spread: bool,
    table: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    if few:
        # every caller has made x just now, and w and tiles before
        return decode.grouped_decode(x, w, fmt, tiles, spread=spread, table=table, bias=bias, overlap=True)
    return _expanded(x, w, fmt, tiles, spread=spread, table=table, bias=bias)


def _expanded(
    x: RowOperand,
    w: Parts,
    fmt: str,
    tiles: Tiles,
    *,
    spread: bool,
    in_order: bool = False,
    table: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Weights expanded, then the GEMM. One matrix alone is expanded piece by piece: its copy could outweigh the rest of a linear."""
    from swapq.kernels.grouped_gemm import grouped_gemm

    experts, n, _ = w.codes.shape
    piece = max(256, _PIECE_BYTES // (2 * padded(length(w, fmt), fmt)) // 256 * 256)
    if experts > 1 or table is not None or n <= piece:
        return grouped_gemm(
            x, expand(w, fmt), w.global_scale, tiles, spread=spread, in_order=in_order, table=table, bias=bias
        )
    out = torch.empty(tiles.rows, n, dtype=torch.bfloat16, device=x.values.device)
    for start in range(0, n, piece):
        at = slice(start, start + piece)
        grouped_gemm(
            x, expand(Parts(w.codes[:, at], w.scales[:, at], None), fmt), w.global_scale, tiles,
            spread=spread, in_order=in_order, bias=None if bias is None else bias[:, at], out=out[:, at],
        )  # fmt: skip
    return out


def _require_width(x: Tensor, w: Parts, fmt: str) -> None:
    width = formats.get(fmt).logical_shape(w.codes)[-1]
    if x.shape[-1] != width:  # a kernel would read past the end
        raise SwapqError(
            f"an input {tuple(x.shape)} has rows of {x.shape[-1]}, the {fmt} weight takes rows of {width}; pass rows of that length"
        )
