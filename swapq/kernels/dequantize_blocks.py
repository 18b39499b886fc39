"""FP8 block and INT4 to BF16 on a GPU, in Triton: every code is read once, nothing is kept in float32 (contract section 7).

The definitions are ``Format.dequantize`` of ``formats/fp8_block.py`` and ``formats/int4.py``, rounded to BF16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from swapq import formats
from swapq.formats import Parts
from swapq.formats.fp8_block import BLOCK

__all__ = ["dequantize_int4", "dequantize_squares"]

_VALUES = 8192  # of INT4 that a program takes


@triton.jit(do_not_specialize=["N", "DOWN"])  # the number of rows is another in every step of training
def _squares(
    codes, scales, out, N, K, DOWN, ACROSS,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    matrix, tile = (tl.program_id(0) // (DOWN * ACROSS)).to(tl.int64), tl.program_id(0) % (DOWN * ACROSS)
    down, across = tile // ACROSS, tile % ACROSS
    n, k = down * B + tl.arange(0, B), across * B + tl.arange(0, B)
    here = (n < N)[:, None] & (k < K)[None, :]
    at = (matrix * N + n[:, None]) * K + k[None, :]
    bits = tl.load(codes + at, mask=here, other=0)
    if COLUMNS:
        scale = tl.load(scales + (matrix * DOWN + down) * K + k, mask=k < K, other=0.0)[None, :]
    elif ROWS:
        scale = tl.load(scales + (matrix * N + n) * ACROSS + across, mask=n < N, other=0.0)[:, None]
    else:
        scale = tl.load(scales + (matrix * DOWN + down) * ACROSS + across)
    y = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    tl.store(out + at, y.to(tl.bfloat16), mask=here)


@triton.jit(do_not_specialize=["GROUPS"])
def _int4(codes, scales, out, GROUPS, G: tl.constexpr, B: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    at, here = group[:, None] * G + tl.arange(0, G)[None, :], (group < GROUPS)[:, None]
    code = tl.load(codes + at, mask=here, other=0)
    scale = tl.load(scales + group, mask=group < GROUPS, other=0.0)
    y = code.to(tl.float32) * scale.to(tl.float32)[:, None]
    tl.store(out + at, y.to(tl.bfloat16), mask=here)


def dequantize_squares(parts: Parts, scope: str, axis: int) -> Tensor:
    """BF16 of FP8 block ``[..., N, K]``, or ``[K]`` in scope ``row``; scales of shape ``FP8Block.part_shapes``."""
    codes = parts.codes.contiguous()
    rows, columns = scope == "row" and axis == -1, axis == -2
    k = codes.shape[-1]
    # where a row has its own scales it does not matter which matrix it is of
    n = codes.numel() // k if rows else codes.shape[-2] // (2 if scope == "halves" else 1)
    down, across = triton.cdiv(n, BLOCK), triton.cdiv(k, BLOCK)
    out = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    with torch.cuda.device_of(codes):  # Triton launches on the current device
        _squares[(codes.numel() // (n * k) * down * across,)](
            codes.view(torch.uint8), parts.scales.contiguous(), out, n, k, down, across,
            ROWS=rows, COLUMNS=columns, B=BLOCK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def dequantize_int4(parts: Parts, fmt: str) -> Tensor:
    """BF16 of INT4: int8 codes ``[..., K]`` as ``Format.quantize`` gives them, BF16 scales ``[..., K/group]``."""
    codes, group = parts.codes.contiguous(), formats.get(fmt).block
    out = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    groups = codes.numel() // group
    with torch.cuda.device_of(codes):
        _int4[(triton.cdiv(groups * group, _VALUES),)](
            codes, parts.scales.contiguous(), out, groups,
            G=group, B=_VALUES // group, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
