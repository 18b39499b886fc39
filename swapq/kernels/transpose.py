"""Matrices of bytes turned on a GPU, in Triton: ``[E, N, K]`` to ``[E, K, N]``. torch's copy goes byte by byte."""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["transposed"]

_TILE, _WARPS = 128, 8


@triton.jit
def _kernel(x, out, N, K, DOWN, ACROSS, B: tl.constexpr):
    matrix, tile = (tl.program_id(0) // (DOWN * ACROSS)).to(tl.int64), tl.program_id(0) % (DOWN * ACROSS)
    n, k = (tile // ACROSS) * B + tl.arange(0, B), (tile % ACROSS) * B + tl.arange(0, B)
    bits = tl.load(x + (matrix * N + n[:, None]) * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0)
    tl.store(out + (matrix * K + k[:, None]) * N + n[None, :], tl.trans(bits), mask=(k < K)[:, None] & (n < N)[None, :])


def transposed(x: Tensor) -> Tensor:
    """``x.transpose(1, 2).contiguous()`` of uint8 ``x [E, N, K]``."""
    experts, n, k = x.shape
    out = torch.empty(experts, k, n, dtype=torch.uint8, device=x.device)
    down, across = triton.cdiv(n, _TILE), triton.cdiv(k, _TILE)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _kernel[(experts * down * across,)](x.contiguous(), out, n, k, down, across, B=_TILE, num_warps=_WARPS)
    return out
