"""Refused numbers on CUDA: every byte of many tensors is read once, in one launch, without a host round trip."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from swapq.kernels.cuda.program import program
from swapq.kernels.cuda.quantize import aligned

__all__ = ["any_refused"]

_THREADS = 256
_ROUNDS = 16
_PIECE = 16 * _THREADS * _ROUNDS  # bytes that a block reads


def any_refused(tensors: Sequence[Tensor], kinds: Sequence[int]) -> Tensor:
    """See :func:`swapq.kernels.refused.any_refused`; `kinds` by their place in refused.cu."""
    device = tensors[0].device
    tensors = [aligned(x) for x in tensors]
    sizes = [x.numel() * x.element_size() for x in tensors]
    pieces = [-(-size // _PIECE) for size in sizes]
    starts = accumulate(pieces, initial=0)
    rows = [(x.data_ptr(), *row) for x, *row in zip(tensors, sizes, kinds, starts, strict=False)]
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
    found = torch.zeros(len(rows), dtype=torch.bool, device=device)
    kernel = program("refused", device, THREADS=_THREADS, ROUNDS=_ROUNDS)
    kernel.launch((sum(pieces),), _THREADS, table, len(rows), found)
    return found
