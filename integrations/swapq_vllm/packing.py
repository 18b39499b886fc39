"""Reads back what vLLM's CPU engine packed. Packing moves elements and changes none, so it can be undone exactly."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["unpack_experts", "weight_by_product"]


@lru_cache(maxsize=8)
def _packed_order(rows: int, columns: int, isa: str) -> Tensor | None:
    """``order[p]`` is the row-major index of the element that prepacking puts at position ``p``.

    It is learned by prepacking the indices themselves, 16 bits at a time, as BF16 bit patterns. None if prepacking is no permutation.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    index = torch.arange(rows * columns)
    order = torch.zeros_like(index)
    for shift in (0, 16):
        pattern = ((index >> shift) & 0xFFFF).to(torch.uint16).view(torch.bfloat16).view(1, rows, columns)
        packed = cpu_prepack_moe_weight(pattern, isa).reshape(-1).view(torch.uint16)
        order |= packed.to(torch.int64) << shift
    return order if torch.equal(order.sort().values, index) else None


def unpack_experts(weight: Tensor, kernel: Any) -> Tensor | None:
    """``weight [E, N, K]`` as it was before the CPU kernel prepacked it; None where the packing is not known.

    Args:
        weight: the live parameter.
        kernel: the layer method's ``moe_kernel``.
    """
    experts = getattr(kernel, "fused_experts", None)
    if getattr(experts, "_use_zentorch", False):
        return weight
    isa = getattr(experts, "isa", None)
    if isa is None or weight.dtype != torch.bfloat16:
        return None
    order = _packed_order(weight.shape[1], weight.shape[2], isa)
    if order is None:
        return None
    flat = torch.empty_like(weight).flatten(1)
    flat[:, order] = weight.flatten(1)
    return flat.view_as(weight)


def weight_by_product(layer: Any) -> Tensor | None:
    """Weight ``[N, K]`` of a packed linear: its product with the identity. Every sum has one term, so it is exact."""
    if layer.params_dtype != torch.bfloat16:
        return None
    columns = getattr(layer, "input_size_per_partition", layer.input_size)
    return layer.quant_method.apply(layer, torch.eye(columns, dtype=torch.bfloat16), None).t().contiguous()
