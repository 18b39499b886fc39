"""Quantizers on CUDA: the bytes of ``swapq.formats``, or the exact operand that the expert kernels read; and the way back."""

from typing import NamedTuple

import torch
from torch import Tensor

from swapq import formats
from swapq.formats import Parts
from swapq.formats.nvfp4 import NVFP4
from swapq.kernels.cuda.program import multiprocessors, program

__all__ = [
    "GROUPS",
    "OPERANDS",
    "RowOperand",
    "aligned",
    "dequantize",
    "expand",
    "length",
    "padded",
    "quantize_matrix",
    "quantize_rows",
    "row_operand",
]

#: elements in one round of the tensor core's order (order.cuh)
GROUPS = {"nvfp4": 128, "mxfp8": 64}
#: 16-bit type that holds a format's operand values exactly
OPERANDS = {"nvfp4": torch.float16, "mxfp8": torch.bfloat16, "fp8_block": torch.float16}
_ROW, _TENSOR, _MXFP8, _FP8_BLOCK = 0, 1, 2, 3
_KINDS = {"nvfp4": _ROW, "mxfp8": _MXFP8, "fp8_block": _FP8_BLOCK}  # of rows
_THREADS = 256
# Two blocks of the quantizer of stacks share the 228 KB of shared memory of a Hopper multiprocessor, 1 KB of each is CUDA's. Beside slices
# a block has tables of factors, one fewer than slices, each counted with a share of amax and barriers.
_STACK_BYTES, _TABLE_BYTES = 113 << 10, 768
_STACK_WARPS, _STACK_LEAD = 4, 2


class RowOperand(NamedTuple):
    """Rows as the expert kernels read them: ``values [M, padded K]`` in the order of order.cuh and float32 ``scale [M]`` or None.

    FP8 block: ``values [M, K]`` in their own order, ``scale [M, ceil(K / 128)]``.
    """

    values: Tensor
    scale: Tensor | None


def aligned(x: Tensor) -> Tensor:
    """``x`` contiguous and where kernels can read 16 bytes at a time: not every view into a flat buffer of parameters is."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def padded(k: int, fmt: str) -> int:
    """Length of a row operand of ``k`` elements."""
    return -(-k // GROUPS[fmt]) * GROUPS[fmt]


def _lanes(k: int) -> int:
    """Lanes that share a row: as many as leave the fewest idle, the most of those."""
    blocks = k // 16
    return min((32, 16, 8), key=lambda lanes: (-(-blocks // lanes) * lanes, -lanes))


def _launch(
    kind: int,
    fmt: str,
    x: Tensor,
    k: int,
    table: Tensor | None,
    scope: tuple[Tensor, Tensor] | None,
    codes: Tensor,
    scales: Tensor | None,
    row_scale: Tensor | None,
    operand: bool,
    beside: bool = False,
) -> None:
    x, rows, lanes = aligned(x), x.numel() // x.shape[-1], _lanes(k)
    kernel = program(
        "quantize_rows",
        x.device,
        K=k,
        LANES=lanes,
        THREADS=_THREADS,
        FORMAT=kind,
        OPERAND=int(operand),
        BESIDE=int(beside),
        GATED=int(table is not None),
        GROUP=GROUPS.get(fmt, 128),
    )
    encode, decode = scope or (None, None)
    per_scope = 1 if encode is None else rows // max(encode.numel(), 1)
    grid = (-(-rows // (_THREADS // lanes)),)
    kernel.launch(grid, _THREADS, x, table, encode, decode, per_scope, rows, codes, scales, row_scale, overlap=True)


def quantize_rows(x: Tensor, fmt: str, *, table: Tensor | None = None) -> Parts:
    """Codes and scales of BF16 rows ``x [M, K]``; one FP32 scale per row in NVFP4, per row and 128 of K in FP8 block.

    Args:
        table: BF16 ``[65536]``, the activation of every BF16 number: then ``x [M, 2K]`` holds gate and up, and what is quantized is
            ``bf16(table[gate]) * up`` (contract section 4).
    """
    form, k = formats.get(fmt), x.shape[-1] // (1 if table is None else 2)
    kind = _KINDS[fmt]
    shapes = form.part_shapes((x.shape[0], k), scope=form.default_scope if kind == _MXFP8 else "row")
    parts = {name: torch.empty(shape, dtype=form.dtypes[name], device=x.device) for name, shape in shapes.items()}
    bytes_, floats = (None, parts["scales"]) if kind == _FP8_BLOCK else (parts["scales"], parts.get("global_scale"))
    _launch(kind, fmt, x, k, table, None, parts["codes"], bytes_, floats, False)
    return Parts(**parts)


def quantize_matrix(x: Tensor, fmt: str, amax: Tensor | None = None) -> Parts:
    """Codes and scales of BF16 weights ``x [..., N, K]``, one FP32 scale per leading index in NVFP4.

    Args:
        amax: float32, shape of the leading dimensions; taken in the same pass if it is not given.
    """
    form, kind, x = formats.get(fmt), _TENSOR if fmt == "nvfp4" else _MXFP8, aligned(x)
    shapes = form.part_shapes(tuple(x.shape), scope=form.default_scope)
    parts = {n: torch.empty(s, dtype=form.dtypes[n], device=x.device) for n, s in shapes.items() if n != "global_scale"}
    if kind == _TENSOR and amax is None:
        team = _team(x.shape[-2], x.shape[-1], 2 * multiprocessors(x.device))
        if team:
            return _quantize_stack(x, parts["codes"], parts["scales"], team)
        least, most = torch.aminmax(x.flatten(-2), dim=-1)
        amax = torch.maximum(most, -least)
    scope = None if amax is None else NVFP4.global_scales(amax.float().contiguous())
    _launch(kind, fmt, x, x.shape[-1], None, scope, parts["codes"], parts["scales"], None, False)
    return Parts(parts["codes"], parts["scales"], None if scope is None else scope[1])


class _Team(NamedTuple):
    """How a stack is shared out (quantize_stack.cu): rows of a slice, slices of a block, blocks of a team, teams."""

    rows: int
    slots: int
    members: int
    teams: int


def _team(n: int, k: int, resident: int) -> _Team | None:
    """As many slices a block as fit, or None where the GPU does not hold two matrices ``[n, k]`` at a time."""
    for slots in (4, 3, 2):
        most_rows = (_STACK_BYTES - (slots - 1) * _TABLE_BYTES) // slots // (2 * k)
        teams = resident // -(-n // most_rows) if most_rows else 0
        if teams:
            rows = -(-n // (resident // teams))
            return _Team(rows, slots, -(-n // rows), teams)
    return None


def _quantize_stack(x: Tensor, codes: Tensor, scales: Tensor, team: _Team) -> Parts:
    *lead, n, k = x.shape
    matrices = codes.shape[:-2].numel()
    decode = torch.empty(lead, dtype=torch.float32, device=x.device)
    tops = torch.zeros(matrices, team.members, dtype=torch.int32, device=x.device)
    kernel = program(
        "quantize_stack", x.device, K=k, N=n, ROWS=team.rows, TEAM=team.members, SLOTS=team.slots,
        LEAD=min(_STACK_LEAD, team.slots - 2), WARPS=_STACK_WARPS,
    )  # fmt: skip
    shared = team.slots * team.rows * k * 2
    kernel.allow_shared_memory(shared)
    grid = (team.members * min(team.teams, matrices),)
    kernel.launch(grid, 32 * _STACK_WARPS + 96, x, matrices, tops, codes, scales, decode, shared=shared, together=True)
    return Parts(codes, scales, decode)


def row_operand(x: Tensor, fmt: str, *, table: Tensor | None = None, beside: bool = False) -> RowOperand:
    """The operand of BF16 rows: quantized and expanded again without codes in between.

    Args:
        table: as in :func:`quantize_rows`.
        beside: at the same time as the kernel launched before, whose results it does not need and whose inputs and results are alive.
    """
    kind, (rows, k) = _KINDS[fmt], x.shape
    k = k if table is None else k // 2
    values = torch.empty(rows, k if kind == _FP8_BLOCK else padded(k, fmt), dtype=OPERANDS[fmt], device=x.device)
    scales = {_ROW: (rows,), _FP8_BLOCK: (rows, -(-k // 128))}.get(kind)
    scale = None if scales is None else torch.empty(scales, dtype=torch.float32, device=x.device)
    _launch(kind, fmt, x, k, table, None, values, None, scale, True, beside)
    return RowOperand(values, scale)


def expand(parts: Parts, fmt: str) -> Tensor:
    """Operand values of stored weights ``[..., N, K]`` in the tensor core's order: ``[..., N, padded K]``."""
    lead, k = parts.codes.shape[:-1], length(parts, fmt)
    width, group = padded(k, fmt), GROUPS[fmt]
    out = torch.empty(*lead, width, dtype=OPERANDS[fmt], device=parts.codes.device)
    rows = lead.numel()
    kernel = program("expand", out.device, K=k, NVFP4=int(fmt == "nvfp4"), GROUP=group, THREADS=_THREADS)
    kernel.launch((-(-rows * width // (group // 4) // _THREADS),), _THREADS, parts.codes, parts.scales, rows, out)
    return out


def dequantize(parts: Parts, fmt: str) -> Tensor:
    """``bf16(dequantize)`` of stored weights or rows ``[..., N, K]``; NVFP4 has one FP32 scale per matrix, or one per row."""
    lead, k = parts.codes.shape[:-1], length(parts, fmt)
    out = torch.empty(*lead, k, dtype=torch.bfloat16, device=parts.codes.device)
    rows, scale = lead.numel(), parts.global_scale
    kernel = program(
        "dequantize",
        out.device,
        K=k,
        NVFP4=int(fmt == "nvfp4"),
        GROUP=GROUPS[fmt],
        SCOPE_ROWS=1 if scale is None else rows // max(scale.numel(), 1),
        THREADS=_THREADS,
    )
    kernel.launch((-(-rows * (k // 8) // _THREADS),), _THREADS, parts.codes, parts.scales, scale, rows, out)
    return out


def length(parts: Parts, fmt: str) -> int:
    """Elements of a stored row."""
    return parts.codes.shape[-1] * (2 if fmt == "nvfp4" else 1)
