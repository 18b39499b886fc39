"""What the Triton GEMMs share: which rows a tile of slots reads and writes."""

import triton
import triton.language as tl

__all__ = ["tile_rows"]


@triton.jit
def tile_rows(
    slots, tiles, tile, rows, top_k, SPREAD: tl.constexpr, SORTED: tl.constexpr, DENSE: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Expert, mask, output rows and input rows of one tile (``cuda/tiles.py``); the caller has left tiles past the last one.

    Places past the tile's end repeat its first one. ``DENSE``: no table, one matrix takes all ``rows`` in their place.
    """
    if DENSE:
        expert = tl.zeros((), tl.int64)
        first = tile * BM
        count = rows - first
    else:
        expert = tl.load(tiles + 1 + 3 * tile).to(tl.int64)
        first = tl.load(tiles + 2 + 3 * tile)
        count = tl.load(tiles + 3 + 3 * tile)
    m = tl.arange(0, BM)
    inside = m < count
    place = (first + tl.where(inside, m, 0)).to(tl.int64)
    slot = place if DENSE else tl.load(slots + place).to(tl.int64)
    out_row = place if SORTED else slot
    row = slot // top_k if SPREAD else out_row
    return expert, inside, out_row, row
