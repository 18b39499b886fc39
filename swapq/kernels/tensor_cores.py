"""Products on a GPU's tensor cores, in the signatures of ``reference``: BF16 operands, float32 sums, gradients rounded to BF16 once.

Forward of formats without kernels of their own stays the reference's; gradients of every format are plain BF16 GEMMs.
"""

import torch
from torch import Tensor

from swapq.kernels import reference
from swapq.kernels.reference import ROW_TILE, grouped_forward, product
from swapq.kernels.routing import Routing

__all__ = ["ROW_TILE", "grouped_forward", "grouped_input_grad", "grouped_weight_grad", "product"]


def _aligned(*lengths: int) -> bool:
    return all(length % 8 == 0 for length in lengths)  # torch's grouped GEMM wants rows of whole 16 bytes


def grouped_input_grad(dy: Tensor, w: Tensor, routing: Routing) -> Tensor:
    """dgrad of each expert: ``dy [R, N]`` times ``w [E, N, K]``, BF16 ``[R, K]``."""
    if not _aligned(*w.shape[1:]) or not dy.shape[0]:
        return reference.grouped_input_grad(dy, w, routing)
    return torch._grouped_mm(dy.to(torch.bfloat16), w.to(torch.bfloat16).contiguous(), offs=routing.ends)


def grouped_weight_grad(dy: Tensor, x: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
    """wgrad of each expert: ``dy [R, N]`` transposed times ``x [R, K]``: float32 sums, rounded to BF16, then ``dtype``; ``[E, N, K]``.

    An expert without rows gets exact zeros.
    """
    if not _aligned(dy.shape[1], x.shape[1]) or not dy.shape[0]:
        return reference.grouped_weight_grad(dy, x, routing, dtype)
    dy, x = dy.to(torch.bfloat16).contiguous(), x.to(torch.bfloat16).contiguous()
    out = torch._grouped_mm(dy.t(), x, offs=routing.ends)
    empty = [expert for expert, count in enumerate(routing.counts) if not count]
    if empty:
        out[empty] = 0
    return out.to(dtype)
