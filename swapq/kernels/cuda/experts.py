"""The expert block on CUDA for a few tokens per expert: six launches that a CUDA graph can hold, nothing read on the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

from swapq import formats
from swapq.formats import Parts
from swapq.kernels.cuda.program import Program, program
from swapq.kernels.cuda.quantize import GROUPS, RowOperand, padded, row_operand

__all__ = ["Tiles", "combine", "expert_block", "grouped", "route"]

_SHARED_BYTES = 220 << 10


@dataclass(frozen=True, slots=True)
class Tiles:
    """Slots sorted by expert and cut into tiles (routing.cu).

    Attributes:
        slots: int32 ``[T * k]``.
        table: int32 ``[1 + 3 * most]``.
        most: tiles that there can be.
        tokens: slots in a tile at most: 8, 16, 32 or 64.
        top_k: slots of a token.
    """

    slots: Tensor
    table: Tensor
    most: int
    tokens: int
    top_k: int


def tile_tokens(slots: int, experts: int) -> int:
    """Slots in a tile, by how many an expert has on average. No result depends on it."""
    mean = slots / experts
    return 8 if mean <= 5 else 16 if mean <= 12 else 32 if mean <= 24 else 64


def route(ids: Tensor, experts: int, *, local_of: Tensor | None = None, tokens: int | None = None) -> Tiles:
    """Tiles of ``ids [T, k]`` (int32 or int64; ids that are not here are left out)."""
    count, top_k = ids.numel(), ids.shape[1]
    tokens = tokens or tile_tokens(count, experts)
    most = min(count, experts + count // tokens)
    slots = torch.empty(count, dtype=torch.int32, device=ids.device)
    table = torch.empty(1 + 3 * most, dtype=torch.int32, device=ids.device)
    kernel = program("routing", ids.device, EXPERTS=experts, TOKENS=tokens, THREADS=1024)
    kernel.launch((1,), 1024, ids, int(ids.dtype == torch.int64), local_of, count, slots, table)
    return Tiles(slots, table, most, tokens, top_k)


def _decode_kernel(
    device: torch.device,
    fmt: str,
    n: int,
    k: int,
    tiles: int,
    gated: bool,
    spread: bool,
    tune: tuple[int, int, int, int],
) -> tuple[Program, int]:
    group = GROUPS[fmt]
    chunk = padded(k, fmt)
    m_tiles, warps, ahead, blocks = tune

    def shared_bytes(chunk: int) -> int:
        return 8 * tiles * (chunk + 16) * 2 + 16 * m_tiles * warps * (chunk // formats.get(fmt).block + 16)

    while shared_bytes(chunk) > _SHARED_BYTES // blocks:
        chunk = -(-chunk // (2 * group * ahead)) * group * ahead
    kernel = program(
        "grouped_decode",
        device,
        K=k,
        N=n,
        NVFP4=int(fmt == "nvfp4"),
        GROUP=group,
        TILES=tiles,
        M_TILES=m_tiles,
        WARPS=warps,
        BLOCKS=blocks,
        CHUNK=chunk,
        AHEAD=ahead,
        GATED=int(gated),
        SPREAD=int(spread),
    )
    kernel.allow_shared_memory(shared_bytes(chunk))
    return kernel, shared_bytes(chunk)


def grouped(
    x: RowOperand,
    w: Parts,
    fmt: str,
    tiles: Tiles,
    *,
    spread: bool,
    table: Tensor | None = None,
    bias: Tensor | None = None,
    tune: tuple[int, int, int, int] = (2, 4, 2, 3),
) -> Tensor:
    """BF16 rows of every slot, ``[T * k, N]``; rows of slots that are not here are not written.

    Args:
        x: a row per token (``spread``) or per slot.
        w: codes and scales of ``[E, N, K]``.
        table: with it the rows are gate and up, and the result is ``bf16(table[gate]) * up``, ``[T * k, N / 2]``.
        bias: float32 ``[E, N]`` or None.
    """
    n, k = w.codes.shape[1], w.codes.shape[2] * (2 if fmt == "nvfp4" else 1)
    gated = table is not None
    kernel, shared = _decode_kernel(x.values.device, fmt, n, k, tiles.tokens // 8, gated, spread, tune)
    width = n // 2 if gated else n
    out = torch.empty(tiles.slots.numel(), width, dtype=torch.bfloat16, device=x.values.device)
    scale = w.global_scale
    stride = 1 if scale is None or scale.dim() == 1 else scale.stride(0)
    m_tiles, warps, *_ = tune
    grid = (-(-width // ((8 if gated else 16) * m_tiles * warps)), tiles.most)
    kernel.launch(
        grid, 32 * warps, x.values, x.scale, w.codes, w.scales, scale, stride, bias, table, tiles.slots, tiles.table,
        tiles.top_k, out, shared=shared,
    )  # fmt: skip
    return out


def combine(rows: Tensor, weights: Tensor, ids: Tensor, experts: int, *, local_of: Tensor | None = None) -> Tensor:
    """``[T, H]`` from the rows of every slot ``[T * k, H]`` and float32 ``weights [T, k]``."""
    tokens, top_k = ids.shape
    hidden = rows.shape[1]
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=rows.device)
    threads = 256
    kernel = program("combine", rows.device, H=hidden, THREADS=threads)
    wide = int(ids.dtype == torch.int64)
    kernel.launch((tokens,), threads, rows, weights, ids, wide, local_of, experts, top_k, out)
    return out


def expert_block(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Parts,
    down: Parts,
    fmt: str,
    table: Tensor,
    *,
    local_of: Tensor | None = None,
    tokens: int | None = None,
    tune: tuple[int, int, int, int] = (2, 4, 2, 3),
) -> Tensor:
    """The block of contract section 4 over codes and scales: BF16 ``[T, H]`` from BF16 ``x [T, H]``."""
    experts = gate_up.codes.shape[0]
    tiles = route(ids, experts, local_of=local_of, tokens=tokens)
    h = grouped(row_operand(x, fmt), gate_up, fmt, tiles, spread=True, table=table, tune=tune)
    y = grouped(row_operand(h, fmt), down, fmt, tiles, spread=False, tune=tune)
    return combine(y, weights, ids, experts, local_of=local_of)
