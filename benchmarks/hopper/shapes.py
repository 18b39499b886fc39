"""Which shape of blocks suits the product for few tokens: every candidate timed as a CUDA graph, its bits compared with the Triton GEMM's.

    python -m benchmarks.hopper.shapes [nvfp4] [mxfp8]

For whoever sets ``_shape`` and ``tile_tokens`` in ``swapq/kernels/cuda/grouped_decode.py``. No bit may depend on the choice: a candidate
whose bits differ is an error.
"""

import argparse
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.hopper.needs import require, require_triton

if __name__ == "__main__":
    require_triton()

import swapq
from benchmarks.hopper.block import INNER, SETS, TOP, E, H
from benchmarks.hopper.timing import build_all, graphed
from swapq.kernels.cuda import grouped_decode as decode
from swapq.kernels.cuda.quantize import GROUPS, expand, row_operand
from swapq.kernels.cuda.tiles import route
from swapq.kernels.grouped_gemm import TILE_ROWS, grouped_gemm
from swapq.nn.gate import activation_table

TOKENS = (1, 16, 64, 128, 256, 512, 1024)
S = decode.Shape
SHAPES: dict[int, tuple[decode.Shape, ...]] = {
    8: (
        S(1, 8, 2, 4), S(2, 8, 2, 2), S(1, 4, 2, 6), S(2, 4, 2, 4), S(1, 8, 2, 3),
        S(1, 8, 2, 4, 2), S(2, 8, 2, 2, 1), S(2, 8, 2, 2, 2), S(2, 8, 2, 2, 4), S(1, 4, 2, 6, 2), S(1, 8, 2, 3, 2),
    ),
    24: (S(2, 8, 2, 2), S(2, 8, 2, 2, 2)),
    32: (S(2, 8, 2, 2), S(2, 16, 2, 1), S(2, 8, 2, 2, 1), S(2, 8, 2, 2, 2), S(2, 8, 2, 2, 4)),
    64: (S(2, 8, 2, 2),),
}  # fmt: skip
MATRICES = {True: (2 * INNER, H), False: (H, INNER)}  # gated: N, K


def candidates(tokens: int) -> Iterator[tuple[int, decode.Shape]]:
    """Slots of a tile, and a shape for it."""
    mean = tokens * TOP / E
    for tile, shapes in SHAPES.items():
        if (mean <= 5) == (tile == 8):
            yield from ((tile, shape) for shape in shapes)


def build(case: tuple[str, bool, int, decode.Shape]) -> None:
    """Compile one candidate into the cache, in a process of its own."""
    fmt, gated, tile, shape = case
    decode._kernel(torch.device("cuda", 0), fmt, *MATRICES[gated], tile, gated, gated, shape)


def best(
    fmt: str, tokens: int, gated: bool, weights: list[swapq.formats.Parts]
) -> list[tuple[float, int, decode.Shape]]:
    """Microseconds, slots of a tile, shape: the fastest first."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    x = torch.randn(tokens if gated else tokens * TOP, MATRICES[gated][1], device=device, dtype=torch.bfloat16)
    ids = torch.topk(torch.rand(tokens, E, device=device), TOP).indices.int()
    operand, table = row_operand(x, fmt), activation_table("silu", device) if gated else None
    tiles = route(ids, E, TILE_ROWS)
    first = weights[0]
    expected = grouped_gemm(operand, expand(first, fmt), first.global_scale, tiles, spread=gated, table=table)
    found = []
    for tile, shape in candidates(tokens):
        tiles = route(ids, E, tile)

        def product(w: swapq.formats.Parts, tiles: object = tiles, shape: decode.Shape = shape) -> torch.Tensor:
            return decode.grouped_decode(operand, w, fmt, tiles, spread=gated, table=table, shape=shape)  # type: ignore[arg-type]

        if not torch.equal(product(first).view(torch.int16), expected.view(torch.int16)):
            raise RuntimeError(f"{fmt}, {tokens} tokens, tile {tile}, shape {shape}: other bits than the GEMM's")
        found.append((graphed(lambda product=product: [product(w) for w in weights], 5) / SETS, tile, shape))
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="*", metavar="format", default=list(GROUPS), help=" or ".join(GROUPS))
    formats, console = parser.parse_args().formats, Console(width=150)
    if unknown := set(formats) - set(GROUPS):
        parser.error(f"no kernel for few tokens reads {', '.join(sorted(unknown))}; it reads {' and '.join(GROUPS)}")
    require(parser)
    cases = [(f, g, t, s) for f in formats for g in MATRICES for t, shapes in SHAPES.items() for s in shapes]
    build_all(build, cases)
    table = Table(title=torch.cuda.get_device_name())
    for column in ("format", "tokens", "matrix", "fastest: us, slots of a tile, shape"):
        table.add_column(column)
    for fmt in formats:
        for gated, (n, k) in MATRICES.items():
            made = [torch.randn(E, n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(SETS)]
            weights = [swapq.quantize(w, fmt).parts for w in made]
            del made
            for tokens in TOKENS:
                line = "  ".join(
                    f"{us:.1f} {tile} {tuple(shape)}" for us, tile, shape in best(fmt, tokens, gated, weights)[:6]
                )
                table.add_row(fmt, str(tokens), "gate and up" if gated else "down", line)
    console.print(table)


if __name__ == "__main__":
    main()
