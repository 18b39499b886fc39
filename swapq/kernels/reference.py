"""The readable torch definition of every product, on any device.

Sums run in float64 and are rounded once to float32. An NVFP4 product of two operands is a multiple of 2^-20 below 2^23, so such a
sum is exact at any practical length: it has the same bits in any order, on any number of threads. MXFP8 sums are not exact by
proof, so rows always go through tiles of one fixed height, zero-padded: a row never sees another row's shape (contract section 4).
"""

import torch
from torch import Tensor

from swapq.kernels.routing import Routing

__all__ = ["ROW_TILE", "grouped_forward", "grouped_input_grad", "grouped_weight_grad", "product"]

ROW_TILE = 16


def product(x: Tensor, w: Tensor) -> Tensor:
    """``x [R, K]`` times ``w [N, K]`` transposed, float32 ``[R, N]``; a row's bits depend on that row and ``w`` alone."""
    rows = x.shape[0]
    tiles = -(-rows // ROW_TILE)
    padded = torch.zeros(tiles * ROW_TILE, x.shape[1], dtype=torch.float64, device=x.device)
    padded[:rows] = x
    wide = w.to(torch.float64).t().expand(tiles, -1, -1)
    sums = torch.bmm(padded.view(tiles, ROW_TILE, x.shape[1]), wide)
    return sums.view(tiles * ROW_TILE, w.shape[0])[:rows].to(torch.float32)


def grouped_forward(x: Tensor, w: Tensor, routing: Routing) -> Tensor:
    """Rows of each expert times that expert's matrix.

    Args:
        x: ``[R, K]``, rows sorted by expert, exact operand values.
        w: ``[E, N, K]``, exact operand values (float64 copies are used as they are).
        routing: where each expert's rows lie.

    Returns:
        float32 ``[R, N]``.
    """
    out = torch.empty(x.shape[0], w.shape[1], dtype=torch.float32, device=x.device)
    for expert, rows in routing.groups():
        out[rows] = product(x[rows], w[expert])
    return out


def grouped_input_grad(dy: Tensor, w: Tensor, routing: Routing) -> Tensor:
    """dgrad of each expert: ``dy [R, N]`` times ``w [E, N, K]``, float32 sums, BF16 ``[R, K]``."""
    out = torch.empty(dy.shape[0], w.shape[2], dtype=torch.bfloat16, device=dy.device)
    for expert, rows in routing.groups():
        out[rows] = (dy[rows].float() @ w[expert].float()).to(torch.bfloat16)
    return out


def grouped_weight_grad(dy: Tensor, x: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
    """wgrad of each expert: ``dy [R, N]`` transposed times ``x [R, K]``, float32 sums, ``[E, N, K]`` in ``dtype``.

    An expert without rows gets exact zeros.
    """
    out = torch.zeros(routing.num_experts, dy.shape[1], x.shape[1], dtype=dtype, device=dy.device)
    for expert, rows in routing.groups():
        out[expert] = (dy[rows].float().t() @ x[rows].float()).to(dtype)
    return out
