"""The random Hadamard transform of contract section 8: it spreads an outlier over 16 elements before they share a block scale.

Its matrix is orthogonal, with entries of +-1/4 that every float holds exactly. So the product of two operands that were both
transformed along their contraction axis is the product of the originals.
"""

from functools import lru_cache

import torch
from torch import Tensor

from swapq.errors import FormatError

__all__ = ["SIZE", "matrix", "transform"]

SIZE = 16
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@lru_cache(maxsize=8)
def matrix(device: torch.device = torch.device("cpu")) -> Tensor:  # noqa: B008  a constant
    """float64 ``[16, 16]``: ``diag(signs) @ H16 / 4``, H16 in Sylvester order. Its transpose is its inverse."""
    hadamard = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while hadamard.shape[0] < SIZE:
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    return (torch.tensor(_SIGNS, dtype=torch.float64, device="cpu")[:, None] * hadamard / 4).to(device)


def transform(x: Tensor) -> Tensor:
    """Transpose ``x`` and transform it along its rows, 16 at a time: BF16 ``[M, K]`` to BF16 ``[K, M]``.

    Sums are rounded to float32, then to BF16.

    Raises:
        FormatError: the number of rows is not a multiple of 16.
    """
    if x.dim() != 2 or x.shape[0] % SIZE:
        raise FormatError(
            f"Hadamard transform: shape {tuple(x.shape)} is not a matrix whose rows are a multiple of {SIZE}; pad it with zero rows"
        )
    blocks = x.t().to(torch.float64).unflatten(-1, (-1, SIZE))
    return (blocks @ matrix(x.device)).flatten(-2).to(torch.float32).to(torch.bfloat16)
