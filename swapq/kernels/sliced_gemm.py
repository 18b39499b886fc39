"""wgrad of FP8 block on a GPU, in Triton: both operands have a scale per row and 128 tokens (contract section 7).

    dw[n, k] = sum over an expert's slices of 128 tokens, ascending, of  f32(dy_codes[:, n] @ x_codes[:, k]) * f32(s_dy[n] * s_x[k])

The definition is :func:`swapq.kernels.sliced.product`; sums of a slice are float32 here, rounded from float64 there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from swapq.formats import Parts

__all__ = ["grouped_weight_grad"]

_SLICE = 128
_TILE_N, _TILE_K, _WARPS, _STAGES = 64, 128, 4, 3  # the largest that spills no register


@triton.jit
def _kernel(
    dy, dy_scale, x, x_scale, slices, dw, N, K,
    BN: tl.constexpr, BK: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(K, BK)
    tiles = tl.cdiv(N, BN) * across
    expert, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    n, k = (tile // across) * BN + tl.arange(0, BN), (tile % across) * BK + tl.arange(0, BK)
    n_here, k_here = n < N, k < K
    acc = tl.zeros((BN, BK), tl.float32)
    for at in range(tl.load(slices + expert), tl.load(slices + expert + 1)):
        line = tl.cast(at, tl.int64)
        token = line * SLICE + tl.arange(0, SLICE)
        a = tl.load(dy + token[:, None] * N + n[None, :], mask=n_here[None, :], other=0)
        b = tl.load(x + token[:, None] * K + k[None, :], mask=k_here[None, :], other=0)
        s_a = tl.load(dy_scale + line * N + n, mask=n_here, other=0.0)
        s_b = tl.load(x_scale + line * K + k, mask=k_here, other=0.0)
        a = a.to(tl.float8e4nv, bitcast=True).to(tl.float16)  # holds E4M3 exactly
        b = b.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        acc = acc + tl.dot(tl.trans(a), b) * (s_a[:, None] * s_b[None, :])
    place = (expert * N + n[:, None]) * K + k[None, :]
    tl.store(dw + place, acc.to(dw.dtype.element_ty), mask=n_here[:, None] & k_here[None, :])


def grouped_weight_grad(dy: Parts, x: Parts, counts: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """``[E, N, K]`` in ``dtype``, rounded to it once; an expert without rows gets exact zeros.

    Args:
        dy: codes ``[R, N]`` float8_e4m3fn and scales float32 ``[R / 128, N]``: column-wise, each expert's rows padded to whole slices.
        x: codes ``[R, K]`` and scales ``[R / 128, K]`` of the same rows.
        counts: rows of each expert, multiples of 128 that add up to ``R``.
    """
    n, k = dy.codes.shape[1], x.codes.shape[1]
    ends = torch.tensor((0, *counts), dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32) // _SLICE
    out = torch.empty(len(counts), n, k, dtype=dtype, device=dy.codes.device)
    grid = (len(counts) * triton.cdiv(n, _TILE_N) * triton.cdiv(k, _TILE_K),)
    with torch.cuda.device_of(dy.codes):  # Triton launches on the current device
        _kernel[grid](
            dy.codes.contiguous().view(torch.uint8), dy.scales.contiguous(), x.codes.contiguous().view(torch.uint8), x.scales.contiguous(),
            ends.to(out.device), out, n, k, BN=_TILE_N, BK=_TILE_K, SLICE=_SLICE,
            num_warps=_WARPS, num_stages=_STAGES, enable_fp_fusion=False,
        )  # fmt: skip
    return out
