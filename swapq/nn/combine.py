"""The weighted sum over a token's experts, with which the expert block ends (contract section 4)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from swapq.kernels import dispatch
from swapq.kernels.routing import Routing

__all__ = ["combine"]


def combine(rows: Tensor, top_k_index: Tensor, top_k_weights: Tensor, routing: Routing) -> Tensor:
    """BF16 ``[T, H]`` from BF16 ``rows [R, H]`` in routed order: float32, in ascending slot order, rounded once. Differentiable."""
    here = (top_k_index >= 0) & (top_k_index < routing.num_experts)
    weights = torch.where(
        here, top_k_weights.float(), 0.0
    )  # the weight of a slot that is not here may be anything, NaN included
    if dispatch.kernels(rows.device) and rows.shape[1] % 2 == 0:
        return _Combine.apply(rows, weights, routing)
    slots = routing.scatter(rows).float() * weights.unsqueeze(-1)
    total = slots[:, 0]
    for j in range(1, routing.top_k):
        total = total + slots[:, j]
    return total.to(torch.bfloat16)


class _Combine(torch.autograd.Function):
    """The same sum without the ``[T, k, H]`` float32 tensor in between."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        from swapq.kernels.cuda import elementwise

        ctx.save_for_backward(rows, weights)
        ctx.routing = routing
        return elementwise.combine(rows.contiguous(), weights.contiguous(), routing.top_k, position=routing.positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        from swapq.kernels.cuda import elementwise

        rows, weights = ctx.saved_tensors
        d_out = d_out.to(torch.bfloat16).contiguous()
        d_rows, d_weights = elementwise.combine_backward(
            rows.contiguous(), weights.contiguous(), ctx.routing.slots, ctx.routing.top_k, d_out
        )
        return d_rows, d_weights, None
