"""Which shape of blocks suits the product for few tokens: every candidate timed as a CUDA graph, its bits compared with the Triton GEMM's.

    python -m benchmarks.hopper.shapes [nvfp4] [mxfp8]

For whoever sets ``_shape`` and ``tile_tokens`` in ``swapq/kernels/cuda/grouped_decode.py``. No bit may depend on the choice: a candidate
whose bits differ is an error.
"""

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import swapq
from benchmarks.hopper.block import INNER, SETS, TOP, E, H
from benchmarks.hopper.timing import graphed
from swapq.kernels.cuda import grouped_decode as decode
from swapq.kernels.cuda.quantize import expand, row_operand
from swapq.kernels.cuda.tiles import Tiles, route
from swapq.kernels.grouped_gemm import TILE_ROWS, grouped_gemm
from swapq.nn.gate import activation_table

TOKENS = (1, 16, 64, 128, 256, 512, 1024)
#: 16-row tiles of a warp, warps of a block, blocks of K in flight, blocks on a multiprocessor
SHAPES: dict[int, tuple[decode.Shape, ...]] = {
    8: ((1, 8, 2, 4), (2, 8, 2, 2), (1, 4, 2, 6), (2, 4, 2, 4), (1, 8, 2, 3), (1, 4, 4, 6), (1, 8, 3, 3)),
    16: ((2, 8, 2, 2), (1, 8, 2, 3), (1, 8, 2, 2), (1, 16, 2, 1)),
    24: ((2, 8, 2, 2), (1, 8, 2, 3), (1, 8, 2, 2), (1, 16, 2, 1)),
    32: ((2, 8, 2, 2), (1, 8, 2, 2), (1, 8, 3, 2), (1, 16, 2, 1), (2, 8, 2, 1)),
    64: ((1, 8, 2, 2), (2, 8, 2, 1), (1, 16, 2, 1), (2, 4, 2, 2)),
}
#: the same with each warp by itself, to see what products of four warps bring
ALONE = {32: ((2, 8, 2, 2),), 64: ((2, 8, 2, 2),)}
MATRICES = {True: (2 * INNER, H), False: (H, INNER)}  # gated: N, K


class Candidate(NamedTuple):
    """Slots of a tile, whether four warps multiply together (on rows in columns), and a shape."""

    tile: int
    columns: bool
    shape: decode.Shape

    def __str__(self) -> str:
        return f"{self.tile}{'' if self.columns else ' alone'} {self.shape}"


def every_candidate() -> Iterator[Candidate]:
    for tile, shapes in SHAPES.items():
        yield from (Candidate(tile, tile > 8, shape) for shape in shapes)
    for tile, shapes in ALONE.items():
        yield from (Candidate(tile, False, shape) for shape in shapes)


def candidates(tokens: int) -> Iterator[Candidate]:
    """Those worth a try with this many tokens."""
    mean = tokens * TOP / E
    for candidate in every_candidate():
        if (
            (mean <= 5) == (candidate.tile == 8)
            and (candidate.tile < 64 or mean > 8)
            and (candidate.tile > 16 or mean < 32)
        ):
            yield candidate


def build(case: tuple[str, bool, Candidate]) -> None:
    """Compile one candidate into the cache, in a process of its own."""
    fmt, gated, c = case
    decode._kernel(torch.device("cuda", 0), fmt, *MATRICES[gated], c.tile, gated, gated, c.shape, c.columns)


def best(fmt: str, tokens: int, gated: bool, weights: list[swapq.formats.Parts]) -> list[tuple[float, Candidate]]:
    """Microseconds of each candidate, the fastest first."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    x = torch.randn(tokens if gated else tokens * TOP, MATRICES[gated][1], device=device, dtype=torch.bfloat16)
    ids = torch.topk(torch.rand(tokens, E, device=device), TOP).indices.int()
    operands = {columns: row_operand(x, fmt, columns=columns) for columns in (False, True)}
    table = activation_table("silu", device) if gated else None
    tiles = route(ids, E, TILE_ROWS)
    first = weights[0]
    expected = grouped_gemm(operands[False], expand(first, fmt), first.global_scale, tiles, spread=gated, table=table)
    found = []
    for c in candidates(tokens):
        tiles = route(ids, E, c.tile)

        def product(w: swapq.formats.Parts, tiles: Tiles = tiles, c: Candidate = c) -> torch.Tensor:
            return decode.grouped_decode(operands[c.columns], w, fmt, tiles, spread=gated, table=table, shape=c.shape)

        if not torch.equal(product(first).view(torch.int16), expected.view(torch.int16)):
            raise RuntimeError(f"{fmt}, {tokens} tokens, {c}: other bits than the GEMM's")
        found.append((graphed(lambda product=product: [product(w) for w in weights], 5) / SETS, c))
    return sorted(found, key=lambda pair: pair[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="*", metavar="format", default=["nvfp4", "mxfp8"], help="nvfp4, mxfp8")
    formats, console = parser.parse_args().formats, Console(width=150)
    if unknown := set(formats) - {"nvfp4", "mxfp8"}:
        parser.error(f"no kernel for few tokens reads {', '.join(sorted(unknown))}; it reads nvfp4 and mxfp8")
    cases = [(f, g, c) for f in formats for g in MATRICES for c in every_candidate()]
    workers = min(12, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:  # CUDA does not survive a fork
        list(pool.map(build, cases))
    table = Table(title=torch.cuda.get_device_name())
    for column in ("format", "tokens", "matrix", "fastest: us, slots of a tile, shape"):
        table.add_column(column)
    for fmt in formats:
        for gated, (n, k) in MATRICES.items():
            made = [torch.randn(E, n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(SETS)]
            weights = [swapq.quantize(w, fmt).parts for w in made]
            del made
            for tokens in TOKENS:
                line = "  ".join(f"{us:.1f} {c}" for us, c in best(fmt, tokens, gated, weights)[:6])
                table.add_row(fmt, str(tokens), "gate and up" if gated else "down", line)
    console.print(table)


if __name__ == "__main__":
    main()
