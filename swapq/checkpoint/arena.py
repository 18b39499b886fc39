"""Arena: the memory that one worker of a conversion uses again for every unit, so that the bytes of a unit stay near the core."""

import math

import torch
from torch import Tensor

from swapq.errors import CheckpointError

__all__ = ["Arena", "aligned"]

_ALIGNMENT = 64


def aligned(nbytes: int) -> int:
    """Bytes that a tensor of ``nbytes`` takes in an arena."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Arena:
    """One block of memory, handed out piece by piece. It grows to the largest unit that it was begun with, and no further."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._taken = 0

    def begin(self, nbytes: int) -> None:
        """Forget every piece handed out so far; have room for ``nbytes``.

        Raises:
            CheckpointError: the memory cannot be had.
        """
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(
                0, dtype=torch.uint8, device="cpu"
            )  # let the old block go before the new one comes
            try:
                self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            except RuntimeError:  # torch's way to say that there is no memory
                raise CheckpointError(
                    f"{nbytes / 1e6:.0f} MB of memory for one worker cannot be had; use fewer workers or free memory"
                ) from None
        self._taken = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor, valid until the next :meth:`begin`. What does not fit gets memory of its own."""
        nbytes = math.prod(shape) * dtype.itemsize
        first, self._taken = self._taken, self._taken + aligned(nbytes)
        if first + nbytes > self._memory.numel():
            return torch.empty(shape, dtype=dtype, device="cpu")
        return self._memory[first : first + nbytes].view(dtype).view(shape)
