"""Tensors as the bytes that files hold."""

from typing import Any

import torch

from swapq.kernels.host import as_array

__all__ = ["as_bytes"]


def as_bytes(t: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    array: Any = as_array(t.detach().contiguous().reshape(-1).view(torch.uint8)) if t.numel() else b""
    return memoryview(array)
