"""Clocks and rows that every part of the benchmark shares."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Row", "copy_bandwidth", "graphed", "microseconds"]


@dataclass(frozen=True)
class Row:
    """One line of the table: a measured value beside its rival's, in one unit, and the target for their ratio."""

    work: str
    ours: float
    rival: float
    unit: str
    ratio: float
    target: str
    met: bool
    note: str = ""

    def line(self) -> str:
        return f"{self.work}: {self.ours:.2f} / {self.rival:.2f} {self.unit} = {self.ratio:.2f} ({self.target}) {self.note}"


def microseconds(work: Callable[[], object], repeats: int = 20, warm: int = 3) -> float:
    """Mean time of ``work`` on the GPU."""
    for _ in range(warm):
        work()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats * 1e3


def graphed(work: Callable[[], object], repeats: int = 10) -> float:
    """The same, replayed as a CUDA graph: no launch cost of Python."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return microseconds(graph.replay, repeats, 2)


def copy_bandwidth() -> float:
    """Bytes read and written per microsecond by a device copy of 2 GiB."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds(lambda: target.copy_(source))
