"""Which implementation runs. A table read at call time: no definition depends on the hardware."""

from dataclasses import dataclass
from types import ModuleType

import torch

from swapq.kernels import reference

__all__ = ["Choice", "choices", "grouped"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs one kind of work on one kind of device, and why (shown by ``swapq doctor``)."""

    work: str
    device: str
    implementation: str
    note: str


def grouped(device: torch.device) -> ModuleType:
    """The module whose ``product`` and ``grouped_*`` functions run on ``device``."""
    return reference


def choices() -> list[Choice]:
    """The table for this machine."""
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    note = "float64 sums in tiles of fixed height: exact, batch-invariant"
    work = ("quantize rows and weights", "grouped GEMM, forward and backward", "MXFP8 linear")
    return [
        Choice(w, d, "torch reference", note if "GEMM" in w or "linear" in w else "contract order")
        for d in devices
        for w in work
    ]
