"""Which shape of blocks suits a linear of few rows: every candidate timed as a CUDA graph, its bits compared with the Triton GEMM's.

    python -m benchmarks.hopper.linear_shapes [mxfp8] [nvfp4]

For whoever sets ``dense_tile_tokens`` and ``_shape_alone`` in ``swapq/kernels/cuda/grouped_decode.py``. Beside them: the weight expanded,
then the GEMM, and BF16 in torch. No bit may depend on the choice: a candidate whose bits differ is an error.
"""

import argparse
from collections.abc import Iterator

import torch
from rich.console import Console

import swapq
from benchmarks.hopper.needs import require
from benchmarks.hopper.timing import build_all, graphed
from swapq.formats import Parts
from swapq.kernels import fast
from swapq.kernels.cuda import grouped_decode as decode
from swapq.kernels.cuda.quantize import GROUPS, row_operand
from swapq.kernels.cuda.tiles import dense_tiles

ROWS = (1, 16, 64, 128, 256)
S = decode.Shape
SHAPES = (
    S(2, 8, 2, 2), S(1, 8, 4, 2), S(1, 4, 8, 2), S(1, 2, 8, 4), S(1, 8, 2, 4), S(1, 4, 2, 6), S(1, 4, 4, 4), S(1, 2, 4, 4),
    S(1, 4, 2, 4, 4), S(1, 2, 2, 8, 4),
)  # fmt: skip
#: attention's projections of Qwen3-30B-A3B, and a head: N, K
MATRICES = {"qkv": (5120, 2048), "o": (2048, 4096), "head": (32768, 2048)}
_BYTES = 128 << 20  # of weights in rotation, so that no cache holds them


def tiles(rows: int) -> Iterator[int]:
    """Slots of a tile."""
    yield from (8,) if rows <= 8 else (16,) if rows <= 16 else (32, 64)


def usual(n: int, rows: int) -> str:
    """What runs where nothing is said, up to four tiles."""
    cut = dense_tiles(rows, decode.dense_tile_tokens(rows, n))
    return f"{cut.tokens} {tuple(decode._shape_alone(n, cut.most))}"


def build(case: tuple[str, str, int, decode.Shape]) -> None:
    """Compile one candidate into the cache, in a process of its own."""
    fmt, matrix, tile, shape = case
    decode._kernel(torch.device("cuda", 0), fmt, *MATRICES[matrix], tile, False, False, shape)


def times(fmt: str, rows: int, weights: list[Parts]) -> list[tuple[float, str]]:
    """Microseconds and what took them, the fastest first."""
    x = row_operand(torch.randn(rows, weights[0].codes.shape[-1] * (2 if fmt == "nvfp4" else 1)).bfloat16().cuda(), fmt)
    large = dense_tiles(rows, 128)
    expected = fast._expanded(x, weights[0], fmt, large, spread=False).view(torch.int16)
    seconds = graphed(lambda: [fast._expanded(x, w, fmt, large, spread=False) for w in weights], 3)
    found = [(seconds / len(weights), "expanded")]
    for tile in tiles(rows):
        cut = dense_tiles(rows, tile)
        for shape in SHAPES:

            def product(w: Parts, cut: object = cut, shape: decode.Shape = shape) -> torch.Tensor:
                return decode.grouped_decode(x, w, fmt, cut, spread=False, shape=shape)  # type: ignore[arg-type]

            if not torch.equal(product(weights[0]).view(torch.int16), expected):
                raise RuntimeError(f"{fmt}, {rows} rows, tile {tile}, shape {shape}: other bits than the GEMM's")
            us = graphed(lambda product=product: [product(w) for w in weights], 3) / len(weights)  # type: ignore[misc]
            found.append((us, f"{tile} {tuple(shape)}"))
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="*", metavar="format", default=["mxfp8"], help=" or ".join(GROUPS))
    formats, console = parser.parse_args().formats, Console(width=190)
    if unknown := set(formats) - set(GROUPS):
        parser.error(f"no kernel for few rows reads {', '.join(sorted(unknown))}; it reads {' and '.join(GROUPS)}")
    require(parser)
    cases = [(f, m, t, s) for f in formats for m in MATRICES for t in (8, 16, 32, 64) for s in SHAPES]
    build_all(build, cases)
    console.print(f"{torch.cuda.get_device_name()}; us, slots of a tile, shape, the fastest first")
    for name, (n, k) in MATRICES.items():
        made = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(1 + _BYTES // (n * k))]
        for fmt in formats:
            quantized = [swapq.quantize(w, fmt).parts for w in made]
            weights = [Parts(*(None if p is None else p[None] for p in parts)) for parts in quantized]
            for rows in ROWS:
                x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
                bf16 = graphed(lambda made=made, x=x: [torch.nn.functional.linear(x, w) for w in made], 3) / len(made)  # type: ignore[misc]
                found = times(fmt, rows, weights)
                line = "  ".join(f"{us:.1f} {what}" for us, what in found[:5])
                others = [f"{us:.1f} {what}" for us, what in found if what in ("expanded", usual(n, rows))]
                console.print(
                    f"{fmt} {name}, {rows} rows, BF16 {bf16:.1f}: {line}; {', '.join(others)}", highlight=False
                )


if __name__ == "__main__":
    main()
