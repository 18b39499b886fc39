"""Quantizers beside a device copy, counting bytes read and written."""

from collections.abc import Iterator

import torch

import swapq
from benchmarks.hopper.timing import Row, copy_bandwidth, graphed


def _nbytes(*tensors: torch.Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def rows() -> Iterator[Row]:
    copy = copy_bandwidth()

    def row(work: str, quantize: object, source: torch.Tensor, target: float) -> Row:
        q = quantize()  # type: ignore[operator]
        moved = _nbytes(source, *q.parts) / graphed(quantize)  # type: ignore[arg-type]
        return Row(work, moved / 1e3, copy / 1e3, "GB/s", moved / copy, f">= {target}", moved / copy >= target)

    for k in (2048, 768):
        x = torch.randn(65536, k, device="cuda", dtype=torch.bfloat16)
        for fmt, scope in (("nvfp4", "row"), ("mxfp8", None)):
            yield row(
                f"quantize rows 65536 x {k}, {fmt}", lambda x=x, f=fmt, s=scope: swapq.quantize(x, f, scope=s), x, 0.80
            )
    for fmt in ("nvfp4", "mxfp8"):
        w = [torch.randn(128, *s, device="cuda", dtype=torch.bfloat16) * 0.02 for s in ((1536, 2048), (2048, 768))]
        seconds = [graphed(lambda t=t, f=fmt: swapq.quantize(t, f)) for t in w]
        moved = sum(_nbytes(t, *swapq.quantize(t, fmt).parts) for t in w) / sum(seconds)
        yield Row(
            f"quantize a layer's experts (604M), {fmt}", moved / 1e3, copy / 1e3, "GB/s", moved / copy, ">= 0.75", moved / copy >= 0.75
        )  # fmt: skip
