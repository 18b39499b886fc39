"""FP8 block and INT4 from BF16 on a GPU, in Triton: every value is read once, nothing is kept in float32 (contract section 7).

The definitions are ``Format.quantize`` of ``formats/fp8_block.py`` and ``formats/int4.py``. Rows of FP8 block have a kernel of their own,
``cuda/quantize_rows.cu``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from swapq import formats
from swapq.formats import Parts
from swapq.formats.bits import E4M3_MAX
from swapq.formats.fp8_block import BLOCK, FLOOR
from swapq.formats.int4 import FLOOR as INT4_FLOOR
from swapq.formats.int4 import ONE_SEVENTH, TOP
from swapq.kernels.routing import Routing

__all__ = ["quantize_columns_of_groups", "quantize_int4", "quantize_squares"]

_GROUPS = 32  # of INT4 that a program takes


@triton.jit
def _value(bits):
    """BF16 bits as float32. Magnitudes are compared before, as integers, so that NaN is above Inf and shows."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _factors(top, FLOOR: tl.constexpr, MOST: tl.constexpr):
    """Scale and its inverse of the largest magnitudes, as BF16 bits."""
    scale = tl.div_rn(tl.maximum(_value(top), FLOOR, propagate_nan=tl.PropagateNan.ALL), MOST)
    return scale, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def _codes(bits, inverse, MOST: tl.constexpr):
    y = tl.clamp(_value(bits) * inverse, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
    return y.to(tl.float8e4nv)


@triton.jit
def _squares(
    x, codes, scales, N, K, DOWN, ACROSS,
    COLUMNS: tl.constexpr, FLOOR: tl.constexpr, MOST: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    matrix, tile = (tl.program_id(0) // (DOWN * ACROSS)).to(tl.int64), tl.program_id(0) % (DOWN * ACROSS)
    down, across = tile // ACROSS, tile % ACROSS
    n, k = down * B + tl.arange(0, B), across * B + tl.arange(0, B)
    here = (n < N)[:, None] & (k < K)[None, :]
    at = (matrix * N + n[:, None]) * K + k[None, :]
    bits = tl.load(x + at, mask=here, other=0)
    top = tl.max(bits & 0x7FFF, axis=0)
    if not COLUMNS:
        top = tl.max(top, axis=0)
    scale, inverse = _factors(top, FLOOR, MOST)
    if COLUMNS:
        tl.store(scales + (matrix * DOWN + down) * K + k, scale, mask=k < K)
        inverse = inverse[None, :]
    else:
        tl.store(scales + (matrix * DOWN + down) * ACROSS + across, scale)
    tl.store(codes + at, _codes(bits, inverse, MOST), mask=here)


@triton.jit(do_not_specialize=["PIECES"])
def _columns_of_groups(
    x, pieces, codes, scales, PIECES, K, ACROSS,
    FLOOR: tl.constexpr, MOST: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    piece, across = (tl.program_id(0) // ACROSS).to(tl.int64), tl.program_id(0) % ACROSS
    k = across * B + tl.arange(0, B)
    row = tl.load(pieces + piece).to(tl.int64) + tl.arange(0, B)
    here = (row < tl.load(pieces + PIECES + piece))[:, None] & (k < K)[None, :]
    bits = tl.load(x + row[:, None] * K + k[None, :], mask=here, other=0)
    scale, inverse = _factors(tl.max(bits & 0x7FFF, axis=0), FLOOR, MOST)
    tl.store(scales + piece * K + k, scale, mask=k < K)
    at = (piece * B + tl.arange(0, B))[:, None] * K + k[None, :]
    tl.store(codes + at, _codes(bits, inverse[None, :], MOST), mask=(k < K)[None, :])  # zeros below the last row


@triton.jit
def _int4(
    x, codes, scales, GROUPS,
    G: tl.constexpr, SEVENTH: tl.constexpr, FLOOR: tl.constexpr, MOST: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    at, here = group[:, None] * G + tl.arange(0, G)[None, :], (group < GROUPS)[:, None]
    bits = tl.load(x + at, mask=here, other=0)
    top = _value(tl.max(bits & 0x7FFF, axis=1))
    scale = tl.maximum(top * SEVENTH, FLOOR, propagate_nan=tl.PropagateNan.ALL).to(tl.bfloat16)
    tl.store(scales + group, scale, mask=group < GROUPS)
    spread = tl.broadcast_to(scale.to(tl.float32)[:, None], (B, G))
    y = tl.div_rn(_value(bits), spread)
    # to nearest even: a sum this large has no place for fractions
    y = (tl.clamp(y, -MOST, MOST) + 12582912.0) - 12582912.0
    tl.store(codes + at, y.to(tl.int8), mask=here)


def quantize_squares(x: Tensor, scope: str, axis: int) -> Parts:
    """FP8 block of BF16 ``x [..., N, K]``: 128x128 (scope ``tile`` or ``halves``, axis -1), or 128 rows of a column (``row``, axis -2)."""
    form, columns = formats.get("fp8_block"), axis == -2
    shapes = form.part_shapes(tuple(x.shape), scope=scope, axis=axis)
    parts = {name: torch.empty(shape, dtype=form.dtypes[name], device=x.device) for name, shape in shapes.items()}
    n, k = x.shape[-2] // (2 if scope == "halves" else 1), x.shape[-1]
    down, across = triton.cdiv(n, BLOCK), triton.cdiv(k, BLOCK)
    grid = (x.numel() // (n * k) * down * across,)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _squares[grid](
            x.contiguous().view(torch.int16), parts["codes"], parts["scales"], n, k, down, across,
            COLUMNS=columns, FLOOR=FLOOR, MOST=E4M3_MAX, B=BLOCK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return Parts(**parts)


def quantize_columns_of_groups(x: Tensor, routing: Routing) -> Parts:
    """FP8 block by columns of BF16 ``x [R, K]`` in routed order, each group padded with zeros to whole blocks of 128 rows.

    ``codes [P, K]``, ``scales [P / 128, K]``: what quantizing :meth:`Routing.pad_rows` gives, without the padded copy.
    """
    pieces, k = routing.pieces(BLOCK), x.shape[1]
    count, across = pieces.shape[1], triton.cdiv(k, BLOCK)
    codes = torch.empty(count * BLOCK, k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(count, k, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _columns_of_groups[(count * across,)](
            x.contiguous().view(torch.int16), pieces, codes, scales, count, k, across,
            FLOOR=FLOOR, MOST=E4M3_MAX, B=BLOCK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return Parts(codes, scales)


def quantize_int4(x: Tensor, fmt: str) -> Parts:
    """INT4 of BF16 ``x [..., K]``: int8 codes as ``Format.quantize`` gives them, a BF16 scale per group."""
    group = formats.get(fmt).block
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(*x.shape[:-1], x.shape[-1] // group, dtype=torch.bfloat16, device=x.device)
    with torch.cuda.device_of(x):
        _int4[(triton.cdiv(scales.numel(), _GROUPS),)](
            x.contiguous().view(torch.int16), codes, scales, scales.numel(),
            G=group, SEVENTH=ONE_SEVENTH, FLOOR=INT4_FLOOR, MOST=TOP, B=_GROUPS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return Parts(codes, scales)
