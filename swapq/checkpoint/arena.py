"""Arena: the memory that one worker of a conversion uses again for every unit, so that the bytes of a unit stay near the core."""

import math

import torch
from torch import Tensor

__all__ = ["Arena", "aligned"]

_ALIGNMENT = 64


def aligned(nbytes: int) -> int:
    """Bytes that a tensor of ``nbytes`` takes in an arena."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Arena:
    """One block of memory, handed out piece by piece. It grows to the largest unit that it was begun with, and no further."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._taken = 0

    def begin(self, nbytes: int) -> None:
        """Forget every piece handed out so far; have room for ``nbytes``."""
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # let the old block go before the new one comes
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        self._taken = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor, valid until the next :meth:`begin`. What does not fit gets memory of its own."""
        nbytes = math.prod(shape) * dtype.itemsize
        first, self._taken = self._taken, self._taken + aligned(nbytes)
        if first + nbytes > self._memory.numel():
            return torch.empty(shape, dtype=dtype)
        return self._memory[first : first + nbytes].view(dtype).view(shape)
