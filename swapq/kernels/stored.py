"""Expert block and linear on a GPU for formats whose scales change along K (FP8 block) or that hold weights alone (INT4).

The signatures are those of ``fast``, which sends these formats here. One Triton kernel runs every number of rows (stored_gemm.py).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from swapq import formats
from swapq.formats import Operand, Parts
from swapq.formats.fp8_block import BLOCK
from swapq.formats.int4 import INT4
from swapq.kernels.cuda.elementwise import combine, swiglu
from swapq.kernels.cuda.quantize import aligned, row_operand
from swapq.kernels.cuda.tiles import Tiles, dense_tiles, route, tiles_of
from swapq.kernels.routing import Routing

__all__ = ["dense_linear", "epilogue_bias", "fits", "input_grad", "routed_rows", "stored_block", "tile_slots"]


def tile_slots(slots: int, experts: int) -> int:
    """Slots in a tile, by how many an expert has on average. No result depends on it."""
    mean = slots / experts
    return 16 if mean <= 8 else 32 if mean <= 64 else 128


def fits(fmt: str, n: int, k: int) -> bool:
    """Whether the kernel takes a matrix ``[N, K]`` in ``fmt``; lengths need not be whole blocks."""
    return (fmt == "fp8_block" or isinstance(formats.get(fmt), INT4)) and k % 16 == 0


def routed_rows(
    x: Tensor, w: Parts, fmt: str, scope: str, bias: Tensor | None, routing: Routing, *, gather: bool
) -> Tensor:
    """BF16 rows ``[R, N]`` in routed order from BF16 ``x``: tokens ``[T, K]`` if ``gather``, else rows ``[R, K]``."""
    tiles = tiles_of(routing, tile_slots(sum(routing.counts), w.codes.shape[0]))
    return _product(_rows(aligned(x), fmt), w, fmt, scope, tiles, spread=gather, in_order=True, bias=bias)


def dense_linear(x: Tensor, w: Parts, fmt: str, bias: Tensor | None, *, scope: str | None = None) -> Tensor:
    """BF16 ``[..., N]`` of ``x [..., K]`` through one stored matrix ``[N, K]``; ``bias [N]``."""
    rows = aligned(x.to(torch.bfloat16).reshape(-1, x.shape[-1]))
    one, scope = Parts(w.codes[None], w.scales[None]), scope or formats.get(fmt).default_scope
    tiles = dense_tiles(rows.shape[0], tile_slots(rows.shape[0], 1))
    y = _product(_rows(rows, fmt), one, fmt, scope, tiles, spread=False, bias=None if bias is None else bias[None])
    return y.view(*x.shape[:-1], y.shape[-1])


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
    """The block of contract section 4, as :func:`swapq.kernels.fast.stored_block`; ``scope`` is that of ``gate_up``."""
    experts, default = gate_up.codes.shape[0], formats.get(fmt).default_scope
    tiles = route(ids, experts, tile_slots(ids.numel(), experts), local_of=local_of)
    h = _product(_rows(x, fmt), gate_up, fmt, scope or default, tiles, spread=True)
    y = _product(_rows(h, fmt, table), down, fmt, default, tiles, spread=False)
    return combine(y, weights, ids.shape[1], ids=ids, experts=experts, local_of=local_of)


def input_grad(dy: Tensor, w: Parts, scope: str, routing: Routing) -> Tensor:
    """dgrad of FP8 block: BF16 ``[R, K]`` from BF16 ``dy [R, N]`` through the tiles of ``w [E, N, K]``, each its own transpose."""
    from swapq.kernels.transpose import transposed

    codes, scales = w.codes.view(torch.uint8), w.scales
    if scope == "halves":  # no slice reaches over their border, so each begins with a block of its own
        half = codes.shape[1] // 2
        fill = -half % BLOCK
        codes = pad(codes.unflatten(1, (2, half)), (0, 0, 0, fill)).flatten(1, 2)
        dy = pad(dy.unflatten(1, (2, half)), (0, fill)).flatten(1)
    turned = Parts(transposed(codes), scales.transpose(1, 2).contiguous())
    return routed_rows(dy, turned, "fp8_block", "tile", None, routing, gather=False)


def epilogue_bias(bias: Tensor | None) -> Tensor | None:
    """A bias as kernels add it: float32, rounded to BF16 first (contract section 3)."""
    return None if bias is None else bias.to(torch.bfloat16).float().contiguous()


def _rows(x: Tensor, fmt: str, table: Tensor | None = None) -> Operand:
    """The operand of BF16 rows: E4M3 values in FP16, with a scale per 128 of K; rows beside INT4 weights as they are.

    With ``table``, ``x`` holds gate and up, and the rows are those of :func:`swapq.kernels.cuda.elementwise.swiglu`.
    """
    if fmt == "fp8_block":
        return Operand(*row_operand(x, fmt, table=table))
    return Operand(x if table is None else swiglu(x, table), None)


def _product(
    x: Operand,
    w: Parts,
    fmt: str,
    scope: str,
    tiles: Tiles,
    *,
    spread: bool,
    in_order: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    from swapq.kernels.stored_gemm import stored_gemm

    form, bias = formats.get(fmt), epilogue_bias(bias)
    codes, scales = w.codes, w.scales.contiguous()
    if isinstance(form, INT4):
        codes = codes if codes.dtype == torch.uint8 else form.stored(Parts(codes, scales)).codes
        return stored_gemm(
            x, codes.contiguous(), scales, tiles, spread=spread, in_order=in_order, bias=bias, group=form.block
        )
    rows = _scale_rows(codes.shape[1], scales.shape[-2], scope, codes.device)
    codes = codes.contiguous().view(torch.uint8)
    return stored_gemm(x, codes, scales, tiles, spread=spread, in_order=in_order, bias=bias, scale_row=rows)


#: kept for good: few shapes exist, and a captured graph may read what is kept here
_kept_rows: dict[tuple[int, int, str, torch.device], Tensor] = {}


def _scale_rows(rows: int, scale_rows: int, scope: str, device: torch.device) -> Tensor:
    """int32 ``[rows]``: which row of scales each row of a weight has."""
    key = (rows, scale_rows, scope, device)
    if key in _kept_rows:
        return _kept_rows[key]
    row = torch.arange(rows, dtype=torch.int32, device=device)
    if scale_rows != rows or rows == 1:  # else already one per row
        half = rows // 2 if scope == "halves" else rows
        row = row // half * -(-half // BLOCK) + row % half // BLOCK
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():  # what a graph computes has no value before its first replay
            return row
        torch.cuda.current_stream(device).synchronize()  # whoever reads it next may be on another stream
    _kept_rows[key] = row
    return row
