"""Tensors as the bytes that files hold."""

from typing import Any

import torch

__all__ = ["as_bytes"]


def as_bytes(t: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    array: Any = t.contiguous().reshape(-1).view(torch.uint8).numpy() if t.numel() else b""
    return memoryview(array)
