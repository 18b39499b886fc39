"""Which shape of blocks suits the product of FP8 blocks and INT4: every candidate timed as a CUDA graph, its bits beside the usual one's.

    python -m benchmarks.hopper.stored_shapes [fp8_block] [int4]

For whoever sets ``tile_slots`` in ``swapq/kernels/stored.py`` and ``_shape`` in ``swapq/kernels/stored_gemm.py``. The choice goes by the
number of rows, so candidates whose bits differ are marked and must not be chosen: of sixteen rows as the left operand Triton takes other
sixteens of K together.
"""

import argparse
from collections.abc import Iterator
from contextlib import suppress

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.hopper.needs import require, require_triton

if __name__ == "__main__":
    require_triton()

import swapq
from benchmarks.hopper.block import INNER, SETS, TOP, E, H
from benchmarks.hopper.timing import build_all, graphed
from swapq import formats
from swapq.formats import Parts
from swapq.kernels import stored
from swapq.kernels.cuda.tiles import route
from swapq.kernels.stored_gemm import Shape, stored_gemm

FORMATS = ("fp8_block", "int4")
TOKENS = (1, 16, 64, 256, 1024, 8192)
TILE_ROWS, USUAL = 128, Shape()  # what all others must equal
LEFT = [Shape(columns, warps, stages, True) for columns, warps in ((128, 8), (128, 4), (64, 4)) for stages in (3, 4)]
TILES = (16, 32, 64, 128)
SHAPES = (USUAL, *LEFT)
MATRICES = {"gate and up": (2 * INNER, H), "down": (H, INNER)}


def candidates(tokens: int) -> Iterator[tuple[int, Shape]]:
    """Slots of a tile, not far from what an expert has, and a shape for it."""
    mean = tokens * TOP / E
    tiles = {tile for tile in TILES if mean / 2 <= tile <= max(32, 4 * mean)} or {TILES[-1]}
    yield from ((tile, shape) for tile in TILES if tile in tiles or tile == TILE_ROWS for shape in SHAPES)


class Case:
    """Tokens, their experts and the product over them."""

    def __init__(self, fmt: str, tokens: int, n: int, k: int, like: Parts) -> None:
        torch.manual_seed(0)
        form = formats.get(fmt)
        self.x = stored._rows(torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16), fmt)
        self.ids = torch.topk(torch.rand(tokens, E, device="cuda"), TOP).indices.int()
        self.rows, self.group = None, form.block
        if fmt == "fp8_block":
            self.group = 0
            self.rows = stored._scale_rows(n, like.scales.shape[-2], form.default_scope, like.codes.device)
        self.tiles = {tile: route(self.ids, E, tile) for tile in TILES}

    def product(self, w: Parts, tile: int, shape: Shape) -> torch.Tensor:
        codes, tiles = w.codes.view(torch.uint8), self.tiles[tile]
        return stored_gemm(
            self.x, codes, w.scales, tiles, spread=True, group=self.group, scale_row=self.rows, shape=shape
        )


def times(fmt: str, tokens: int, n: int, k: int, weights: list[Parts]) -> list[tuple[float, bool, int, Shape]]:
    """Microseconds, whether the bits are the usual ones, slots of a tile, shape: the fastest first."""
    case = Case(fmt, tokens, n, k, weights[0])
    usual = case.product(weights[0], TILE_ROWS, USUAL)
    found = []
    for tile, shape in candidates(tokens):
        try:
            same = torch.equal(case.product(weights[0], tile, shape).view(torch.int16), usual.view(torch.int16))
        except RuntimeError as error:  # of Triton: more shared memory or registers than there are
            print(f"{fmt}, tile {tile}, {shape}: {str(error).splitlines()[0]}")
            continue
        work = [(w, tile, shape) for w in weights]
        found.append((graphed(lambda work=work: [case.product(*w) for w in work], 3) / SETS, same, tile, shape))  # type: ignore[misc]
    return sorted(found)


def build(case: tuple[str, int, Shape]) -> None:
    """Compile one candidate into Triton's cache, in a process of its own."""
    fmt, tile, shape = case
    for n, k in MATRICES.values():
        w = formats.get(fmt).stored(swapq.quantize(torch.ones(1, n, k, device="cuda", dtype=torch.bfloat16), fmt).parts)
        one = Case(fmt, 1, n, k, w)
        one.tiles = {tile: route(one.ids * 0, 1, tile)}
        with suppress(RuntimeError):  # said where it is timed
            one.product(w, tile, shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="*", metavar="format", default=FORMATS, help=" or ".join(FORMATS))
    options, console = parser.parse_args(), Console(width=150)
    if unknown := set(options.formats) - set(FORMATS):
        parser.error(f"the kernel does not read {', '.join(sorted(unknown))}; it reads {' and '.join(FORMATS)}")
    require(parser)
    cases = [(fmt, tile, shape) for fmt in options.formats for tile in TILES for shape in SHAPES]
    build_all(build, cases)
    for fmt in options.formats:
        table = Table(title=f"{fmt}, {torch.cuda.get_device_name()}")
        for column in (
            "tokens",
            "matrix",
            "fastest: us, slots of a tile, columns, warps, stages, weights left; ! other bits",
        ):
            table.add_column(column)
        for name, (n, k) in MATRICES.items():
            made = [torch.randn(E, n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(SETS)]
            weights = [formats.get(fmt).stored(swapq.quantize(w, fmt).parts) for w in made]
            del made
            for tokens in TOKENS:
                found = times(fmt, tokens, n, k, weights)
                usual = next(us for us, _, tile, shape in found if (tile, shape) == (TILE_ROWS, USUAL))
                line = "  ".join(
                    f"{us:.1f}{'' if same else '!'} {tile} {tuple(shape)}" for us, same, tile, shape in found[:5]
                )
                table.add_row(str(tokens), name, f"{line}  (usual {usual:.1f})")
        console.print(table)


if __name__ == "__main__":
    main()
