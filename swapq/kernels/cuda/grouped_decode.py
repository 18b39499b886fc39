"""Grouped product of stored weights with few tokens per expert (grouped_decode.cu): codes are expanded in registers, read once."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from swapq import formats
from swapq.formats import Parts
from swapq.kernels.cuda.program import Program, program
from swapq.kernels.cuda.quantize import GROUPS, RowOperand, length, padded
from swapq.kernels.cuda.tiles import Tiles

__all__ = ["Shape", "dense_tile_tokens", "grouped_decode", "tile_tokens"]

_SHARED_BYTES = 220 << 10  # of a Hopper multiprocessor's 228 KiB; a block takes 1 KiB more than it asks for
_MULTIPROCESSORS = 132  # of an H200, on which shapes were chosen


class Shape(NamedTuple):
    """How a block works (constants of grouped_decode.cu). No result depends on it."""

    m_tiles: int
    warps: int
    ahead: int
    blocks: int
    lines: int = 0


def tile_tokens(slots: int, experts: int) -> int:
    """Slots in a tile, by how many an expert has on average. No result depends on it."""
    mean = slots / experts
    return 8 if mean <= 5 else 32


def dense_tile_tokens(rows: int, n: int) -> int:
    """Slots in a tile of a linear's few rows: wide ones where blocks of 128 weight rows keep a GPU busy. No result depends on it."""
    if rows > 32 and -(-n // 128) * -(-rows // 64) >= _MULTIPROCESSORS:
        return 64
    return 8 if rows <= 8 else 16 if rows <= 16 else 32


def _shape(fmt: str, n: int, tokens: int, gated: bool, blocks: int) -> Shape:
    """What was fastest on an H200 for a stack of matrices. No result depends on it."""
    if tokens > 8:
        return Shape(2, 8, 2, 2)
    if blocks * n < _MULTIPROCESSORS * 512:  # so little work that every multiprocessor should get a piece
        return Shape(1, 8, 2, 3, 2) if gated else Shape(1, 4, 2, 6, 2 if fmt == "mxfp8" else 0)
    if gated:
        return Shape(1, 4, 2, 6) if fmt == "nvfp4" else Shape(2, 8, 2, 2)
    return Shape(1, 8, 2, 4)


def _shape_alone(n: int, tiles: int) -> Shape:
    """The same for a single matrix, whose blocks are few: the fewer there are, the more codes each has on their way."""
    return Shape(1, 8, 4, 2) if 2 * -(-n // 128) * tiles >= _MULTIPROCESSORS else Shape(1, 4, 8, 2)


@lru_cache(maxsize=512)
def _kernel(
    device: torch.device, fmt: str, n: int, k: int, tokens: int, gated: bool, spread: bool, shape: Shape
) -> tuple[Program, int]:
    group, block = GROUPS[fmt], formats.get(fmt).block
    m_tiles, warps, ahead, blocks, lines = shape
    chunk = padded(k, fmt)

    def shared_bytes(chunk: int) -> int:
        return tokens * (chunk + 16) * 2 + 16 * m_tiles * warps * (chunk // block + 16)

    while shared_bytes(chunk) > _SHARED_BYTES // blocks and chunk > group * ahead:
        chunk = -(-chunk // (2 * group * ahead)) * group * ahead
    kernel = program(
        "grouped_decode",
        device,
        K=k,
        N=n,
        NVFP4=int(fmt == "nvfp4"),
        GROUP=group,
        TILES=tokens // 8,
        M_TILES=m_tiles,
        WARPS=warps,
        BLOCKS=blocks,
        CHUNK=chunk,
        AHEAD=ahead,
        LINES=lines,
        GATED=int(gated),
        SPREAD=int(spread),
    )
    kernel.allow_shared_memory(shared_bytes(chunk))
    return kernel, shared_bytes(chunk)


def grouped_decode(
    x: RowOperand,
    w: Parts,
    fmt: str,
    tiles: Tiles,
    *,
    spread: bool,
    table: Tensor | None = None,
    bias: Tensor | None = None,
    shape: Shape | None = None,
    overlap: bool = False,
) -> Tensor:
    """BF16 rows of every slot, ``[R, N]``; rows of slots that are not here are not written.

    Args:
        x: a row per token (``spread``) or per slot.
        w: codes and scales of ``[E, N, K]``.
        table: with it the rows are gate and up, and the result is ``bf16(table[gate]) * up``, ``[R, N / 2]``.
        bias: float32 ``[E, N]`` or None.
        shape: for measurements; chosen if it is not given.
        overlap: begin while the kernel launched before ends. It may have made ``x``, but neither ``w`` nor ``tiles``.
    """
    n, k, gated = w.codes.shape[1], length(w, fmt), table is not None
    experts = w.codes.shape[0]
    if shape is None and experts == 1 and not gated:
        shape = _shape_alone(n, tiles.most)
    shape = shape or _shape(fmt, n, tiles.tokens, gated, min(tiles.most, experts))
    kernel, shared = _kernel(x.values.device, fmt, n, k, tiles.tokens, gated, spread, shape)
    width = n // 2 if gated else n
    out = torch.empty(tiles.rows, width, dtype=torch.bfloat16, device=x.values.device)
    scale = w.global_scale
    grid = (-(-width // ((8 if gated else 16) * shape.m_tiles * shape.warps)), tiles.most)
    kernel.launch(
        grid, 32 * shape.warps, x.values, x.scale, w.codes, w.scales, scale, 0 if scale is None else scale.stride(0), bias, table,
        tiles.slots, tiles.table, tiles.rows, tiles.top_k, out, shared=shared, overlap=overlap,
    )  # fmt: skip
    return out
