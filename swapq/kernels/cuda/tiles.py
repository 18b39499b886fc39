"""Tiles: routed slots sorted by expert and cut into pieces that one block of a grouped kernel takes."""

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from swapq.kernels.cuda.program import program
from swapq.kernels.routing import Routing

__all__ = ["Tiles", "dense_tiles", "route", "tiles_of"]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Work of a grouped kernel.

    Attributes:
        slots: int32 ``[R]``, the slot (token * top_k + j) at each position of the sorted order; None where a row's place is its slot.
        table: int32 ``[1 + 3 * most]``: the number of tiles, then (expert, first position, positions) each. None where one matrix takes
            every row in its place.
        most: tiles that there can be.
        tokens: positions in a tile at most.
        top_k: slots of a token.
        rows: rows of the output.
    """

    slots: Tensor | None
    table: Tensor | None
    most: int
    tokens: int
    top_k: int
    rows: int


def route(ids: Tensor, experts: int, tokens: int, *, local_of: Tensor | None = None) -> Tiles:
    """Tiles of ``ids [T, k]`` (int32 or int64), made on the device (routing.cu); ids that are not here are left out.

    Args:
        local_of: int32, local id of each global id, -1 for another rank's; None where ids are local.
    """
    count, top_k = ids.numel(), ids.shape[1]
    most = min(count, experts + count // tokens)
    slots = torch.empty(count, dtype=torch.int32, device=ids.device)
    table = torch.empty(1 + 3 * most, dtype=torch.int32, device=ids.device)
    kernel = program("routing", ids.device, EXPERTS=experts, TOKENS=tokens, THREADS=1024)
    known = 0 if local_of is None else local_of.numel()
    wide = int(ids.dtype == torch.int64)
    kernel.launch((1,), 1024, ids, wide, local_of, known, count, slots, table, overlap=True)
    return Tiles(slots, table, most, tokens, top_k, count)


def tiles_of(routing: Routing, tokens: int) -> Tiles:
    """Tiles of a routing whose counts are known on the host: rows keep the routing's order."""
    rows, start = [], 0
    for expert, count in enumerate(routing.counts):
        rows += [(expert, start + i, min(tokens, count - i)) for i in range(0, count, tokens)]
        start += count
    table = _table(rows, routing.slots.device)
    return Tiles(routing.slots.to(torch.int32), table, len(rows), tokens, routing.top_k, start)


def _table(pieces: list[tuple[int, int, int]], device: torch.device) -> Tensor:
    table = [len(pieces), *chain.from_iterable(pieces)]
    return torch.tensor(table, dtype=torch.int32, device="cpu").to(device)


def dense_tiles(rows: int, tokens: int) -> Tiles:
    """Tiles of one matrix that takes every row in its place."""
    return Tiles(None, None, -(-rows // tokens), tokens, 1, rows)
