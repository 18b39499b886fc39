"""Clocks and rows that every part of the benchmark shares."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch

__all__ = ["Row", "build_all", "copy_bandwidth", "graphed", "microseconds"]


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


def build_all(build: Callable[[Any], None], cases: Iterable[Any]) -> None:
    """Compile every candidate into a cache, some at a time."""
    with ProcessPoolExecutor(
        min(12, os.cpu_count() or 1), get_context("spawn")
    ) as pool:  # CUDA does not survive a fork
        list(pool.map(build, cases))
