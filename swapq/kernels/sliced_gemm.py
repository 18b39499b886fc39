"""wgrad of FP8 block on a GPU, in Triton: both operands have a scale per row and 128 tokens (contract section 7).

    dw[n, k] = sum over an expert's slices of 128 tokens, ascending, of  f32(dy_codes[:, n] @ x_codes[:, k]) * f32(s_dy[n] * s_x[k])

The definition is :func:`swapq.kernels.sliced.product`; sums of a slice are float32 here, rounded from float64 there. Codes are widened to
FP16, which holds E4M3 exactly, some experts at a time: the tensor core then reads both operands from where TMA puts them. Widened in the
product itself they go through registers and shared memory once more, and that is what such a product waits for.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from swapq.formats import Parts

__all__ = ["grouped_weight_grad"]

_SLICE = 128
_TILE_N, _TILE_K, _WARPS, _STAGES = 128, 128, 8, 3  # the largest that spills no register
#: rows that are widened at a time, about; one expert may have more
_ROWS = 1 << 15


@triton.jit(do_not_specialize=["first", "line"])
def _kernel(
    dy, dy_scale, x, x_scale, slices, dw, first, line, N, K,
    BN: tl.constexpr, BK: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(K, BK)
    tiles = tl.cdiv(N, BN) * across
    expert, tile = (first + tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    n_from, k_from = (tile // across) * BN, (tile % across) * BK
    n, k = n_from + tl.arange(0, BN), k_from + tl.arange(0, BK)
    n_here, k_here = n < N, k < K
    acc = tl.zeros((BN, BK), tl.float32)
    for at in range(tl.load(slices + expert), tl.load(slices + expert + 1)):
        row, scale = (at - line) * SLICE, tl.cast(at, tl.int64)
        a, b = dy.load([row, n_from]), x.load([row, k_from])
        s_a = tl.load(dy_scale + scale * N + n, mask=n_here, other=0.0)
        s_b = tl.load(x_scale + scale * K + k, mask=k_here, other=0.0)
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
    out = torch.empty(len(counts), n, k, dtype=dtype, device=dy.codes.device)
    ends = torch.tensor((0, *counts), dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32) // _SLICE
    ends, scales = ends.to(out.device), (dy.scales.contiguous(), x.scales.contiguous())
    tiles = triton.cdiv(n, _TILE_N) * triton.cdiv(k, _TILE_K)
    for experts, rows in _pieces(counts):
        if rows.start == rows.stop:  # TMA describes no empty tensor
            out[experts] = 0
            continue
        a, b = (
            TensorDescriptor.from_tensor(codes[rows].to(torch.float16).contiguous(), [_SLICE, tile])
            for codes, tile in ((dy.codes, _TILE_N), (x.codes, _TILE_K))
        )
        with torch.cuda.device_of(out):  # Triton launches on the current device
            _kernel[((experts.stop - experts.start) * tiles,)](
                a, scales[0], b, scales[1], ends, out, experts.start, rows.start // _SLICE, n, k,
                BN=_TILE_N, BK=_TILE_K, SLICE=_SLICE, num_warps=_WARPS, num_stages=_STAGES, enable_fp_fusion=False,
            )  # fmt: skip
    return out


def _pieces(counts: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Experts beside each other, and their rows: about ``_ROWS`` of them."""
    first = start = end = 0
    for expert, rows in enumerate(counts):
        if end > start and end - start + rows > _ROWS:
            yield slice(first, expert), slice(start, end)
            first, start = expert, end
        end += rows
    if first < len(counts):
        yield slice(first, len(counts)), slice(start, end)
