"""What no quantizer writes, found in codes and scales before they are served."""

import torch
from torch import Tensor

from swapq import formats

__all__ = ["can_be_unsound", "unsound"]


def can_be_unsound(fmt: str, part: str) -> bool:
    """Whether some byte of that part is one that no quantizer writes: every E2M1 code is a number, and the largest part of a model."""
    form = formats.get(fmt)
    return part != "codes" or form.dtypes[part] != torch.uint8 or fmt.startswith("int4")


def unsound(x: Tensor, fmt: str, part: str) -> Tensor:
    """Where ``x`` holds NaN, Inf or a block scale below zero; bool, shape of ``x``.

    Args:
        x: one stored part of tensors in format ``fmt``.
        part: ``"codes"``, ``"scales"`` or ``"global_scale"``.
    """
    if formats.get(fmt).dtypes[part] in (torch.float32, torch.bfloat16):
        return ~((x > 0) & (x < float("inf")))
    bits = x.view(torch.uint8)
    if formats.get(fmt).dtypes[part] == torch.float8_e4m3fn:
        return bits >= 0x7F if part == "scales" else (bits & 0x7F) == 0x7F
    if part == "scales":
        return bits == 0xFF  # E8M0's NaN
    if fmt.startswith("int4"):
        return ((bits & 0xF) == 8) | ((bits >> 4) == 8)  # -8, outside the symmetric range
    return torch.zeros_like(bits, dtype=torch.bool)  # every E2M1 code is a number
