"""Peak memory of one linear, beside TransformerEngine's published numbers for the same shapes (BF16 input 2048 x 2048, 8192 outputs)."""

from collections.abc import Iterator

import torch

from benchmarks.hopper.timing import Row
from swapq.kernels.routing import Routing
from swapq.nn.functional import LinearSpec, TrainableExpertLinear, quantize_weight

PUBLISHED = {
    ("mxfp8", "high_precision"): (53.12, 40.02),
    ("mxfp8", "dequantized"): (53.25, 80.02),
    ("nvfp4", "high_precision"): (44.50, 40.02),
    ("nvfp4", "dequantized"): (44.50, 80.02),
}


def _peak(work: object) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()  # type: ignore[operator]
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def rows() -> Iterator[Row]:
    routing = Routing.single(2048, torch.device("cuda"))
    for (fmt, mode), published in PUBLISHED.items():
        x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        w = torch.nn.Parameter(torch.randn(1, 8192, 2048, device="cuda", dtype=torch.bfloat16) * 0.02)
        spec, held = LinearSpec(fmt, fmt, mode), {}

        def forward(w=w, x=x, spec=spec, held=held) -> None:
            q = quantize_weight(w, spec.weights)
            held["y"] = TrainableExpertLinear(w, None, spec, q)(x, routing, gather=False)

        forward()
        dy = torch.ones_like(held["y"])
        held["y"].backward(dy)
        held.clear()
        x.grad = w.grad = None
        found = _peak(forward), _peak(lambda held=held, dy=dy: held["y"].backward(dy))
        for name, ours, theirs in zip(("forward", "backward"), found, published, strict=True):
            yield Row(
                f"linear {name}, {fmt} {mode}",
                ours,
                theirs,
                "MiB",
                ours / theirs,
                "<= 1",
                ours <= theirs,
                "rival: published, another GPU",
            )
