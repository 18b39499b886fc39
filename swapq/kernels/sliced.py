"""Products whose scales change along the contraction axis: FP8 block, in forward and backward (contract section 7).

Each slice is summed and rounded once to float32, multiplied by ``f32(s_x * s_w)`` and added, slices in ascending order, every step one
float32 operation. A slice of 128 products of two E4M3 numbers is a multiple of 2^-18 below 2^25, so its float64 sum is exact: it
has the same bits in any order.
"""

import torch
from torch import Tensor

from swapq.formats import Operand
from swapq.kernels import reference
from swapq.kernels.routing import Routing

__all__ = ["Spans", "grouped_forward", "product", "spans"]

Spans = tuple[tuple[int, int], ...]


def spans(length: int, block: int, sections: int = 1) -> Spans:
    """Start and end of each slice of an axis: blocks within each of ``sections`` equal parts, the last one of a part maybe shorter."""
    part = length // sections
    edges = [(start, min(start + block, part)) for start in range(0, part, block)]
    return tuple((s * part + a, s * part + b) for s in range(sections) for a, b in edges)


def product(x: Operand, w: Operand, slices: Spans) -> Tensor:
    """``x``: values ``[R, K]``, scale ``[R, slices]``; ``w``: ``[N, K]``, ``[N, slices]``. float32 ``[R, N]``, a row by itself."""
    if x.scale is None or w.scale is None:
        raise TypeError("operands of a sliced product carry a scale per slice")
    total = torch.zeros(x.values.shape[0], w.values.shape[0], dtype=torch.float32, device=x.values.device)
    for j, (start, end) in enumerate(slices):
        acc = reference.product(x.values[:, start:end], w.values[:, start:end])
        total = total + acc * (x.scale[:, j, None] * w.scale[None, :, j])
    return total


def grouped_forward(x: Operand, w: Operand, routing: Routing, slices: Spans) -> Tensor:
    """Rows of each expert times that expert's matrix.

    Args:
        x: values ``[R, K]``, scale ``[R, slices]``, rows sorted by expert.
        w: values ``[E, N, K]``, scale ``[E, N, slices]``.

    Returns:
        float32 ``[R, N]``.
    """
    if x.scale is None or w.scale is None:
        raise TypeError("operands of a sliced product carry a scale per slice")
    out = torch.empty(x.values.shape[0], w.values.shape[1], dtype=torch.float32, device=x.values.device)
    for expert, rows in routing.groups():
        theirs = Operand(w.values[expert], w.scale[expert])
        out[rows] = product(Operand(x.values[rows], x.scale[rows]), theirs, slices)
    return out
