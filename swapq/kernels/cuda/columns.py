"""Column-wise MXFP8 on CUDA, for groups of rows: what backward `low_precision` multiplies (contract section 5)."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from swapq.formats import Parts
from swapq.kernels.cuda.program import program

__all__ = ["column_values", "quantize_columns", "stored_values"]

_BLOCK, _THREADS = 32, 256
_CODES, _VALUES, _STORED = 0, 1, 2


@lru_cache(maxsize=64)
def _starts(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """First row of every block of at most 32 rows, each within one group, and the end: int32 ``[blocks + 1]``."""
    ends = list(accumulate(counts, initial=0))
    starts = [row for a, b in pairwise(ends) for row in range(a, b, _BLOCK)]
    return torch.tensor([*starts, ends[-1]], dtype=torch.int32, device="cpu").to(device)


def _launch(mode: int, k: int, starts: Tensor, *args: Tensor | None) -> None:
    kernel = program("quantize_columns", starts.device, K=k, MODE=mode, THREADS=_THREADS)
    x, codes, scales, values = args
    kernel.launch((-(-k // 2 // _THREADS) * (starts.numel() - 1),), _THREADS, x, starts, codes, scales, values)


def quantize_columns(x: Tensor, counts: Sequence[int]) -> Parts:
    """Codes ``[M, K]`` and scales ``[blocks, K]`` of contiguous BF16 ``x [M, K]``, blocks of 32 rows within groups of ``counts`` rows.

    The codes are those of the same groups padded with zero rows; the padding is not stored.
    """
    starts = _starts(tuple(counts), x.device)
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(starts.numel() - 1, x.shape[1], dtype=torch.uint8, device=x.device)
    _launch(_CODES, x.shape[1], starts, x, codes, scales, None)
    return Parts(codes, scales)


def column_values(x: Tensor, counts: Sequence[int]) -> Tensor:
    """The exact BF16 values of :func:`quantize_columns`, without codes in between."""
    out = torch.empty_like(x)
    _launch(_VALUES, x.shape[1], _starts(tuple(counts), x.device), x, None, None, out)
    return out


def stored_values(parts: Parts, counts: Sequence[int]) -> Tensor:
    """The exact BF16 values of what :func:`quantize_columns` returned."""
    out = torch.empty(parts.codes.shape, dtype=torch.bfloat16, device=parts.codes.device)
    starts = _starts(tuple(counts), out.device)
    _launch(_STORED, out.shape[1], starts, None, parts.codes, parts.scales, out)
    return out
