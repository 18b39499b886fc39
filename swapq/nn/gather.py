"""Whole tensors of sharded parameters."""

from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["whole"]


def whole(p: Tensor) -> Tensor:
    """The full plain tensor of ``p``. A DTensor is gathered: every rank must call this, in the same order."""
    return p.full_tensor() if isinstance(p, DTensor) else p
