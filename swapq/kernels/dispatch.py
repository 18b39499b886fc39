"""Which implementation runs. Decided by device, format and shape alone, so that a trainer and an engine on equal GPUs decide alike."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from swapq import formats
from swapq.errors import UnsupportedError
from swapq.formats import Parts
from swapq.formats.int4 import INT4
from swapq.kernels import cpu, reference

__all__ = ["Choice", "choices", "dequantize", "fast", "grouped", "kernels", "quantize", "stored", "use"]

_MODES = ("auto", "reference")
_mode = "auto"


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs one kind of work on one kind of device, and why (shown by ``swapq doctor``)."""

    work: str
    device: str
    implementation: str
    note: str


@contextmanager
def use(mode: str) -> Iterator[None]:
    """Inside, ``"reference"`` runs the torch definition on every device; ``"auto"`` is the default. Process-wide.

    Raises:
        UnsupportedError: another mode.
    """
    global _mode
    if mode not in _MODES:
        raise UnsupportedError(f"kernels {mode!r} are not known; use one of {', '.join(_MODES)}")
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def kernels(device: torch.device) -> bool:
    """Whether swapq's CUDA kernels run on ``device``: a Hopper GPU.

    Later ones could run them, but that their two products add in one order has been measured on Hopper alone.
    """
    if _mode != "auto" or device.type != "cuda":
        return False
    return _is_hopper(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=64)
def _is_hopper(index: int) -> bool:
    """Asked for every tensor of a sync, and torch looks it up anew each time."""
    return torch.cuda.get_device_capability(index)[0] == 9


def fast(device: torch.device, weights: str, activations: str, shape: Sequence[int], slices: int = 1) -> bool:
    """Whether a linear of weight ``shape`` ``[..., N, K]`` runs on ``swapq.kernels.fast``; else on the reference (other bits)."""
    if not kernels(device) or slices != 1:
        return False
    if activations != ("bf16" if isinstance(formats.get(weights), INT4) else weights):
        return False
    from swapq.kernels.fast import fits

    return fits(weights, shape[-2], shape[-1])


def grouped(device: torch.device) -> ModuleType:
    """The module whose ``product`` and ``grouped_*`` functions run on ``device``."""
    if not kernels(device):
        return reference
    from swapq.kernels import tensor_cores

    return tensor_cores


def quantize(x: Tensor, fmt: str, scope: str, axis: int, amax: Tensor | None) -> Parts | None:
    """The bytes of ``Format.quantize`` from a kernel, or None where there is none for this tensor."""
    if x.dtype != torch.bfloat16 or x.dim() < 2 or not x.numel():
        return None
    if x.device.type == "cpu" and _mode == "auto" and axis == -1:
        return cpu.quantize_weights(x, fmt, amax, scope=scope)
    if not kernels(x.device):
        return None
    from swapq.kernels import quantize_blocks as blocks
    from swapq.kernels.cuda import quantize as cuda

    if fmt == "mxfp8" and axis == -2:
        return _columns(cuda.aligned(x)) if x.shape[-1] % 2 == 0 else None
    if fmt == "mxfp8" or (fmt == "nvfp4" and scope == "tensor"):
        return cuda.quantize_matrix(x, fmt, amax)
    if fmt == "nvfp4" and scope == "row" and amax is None and x.dim() == 2:
        return cuda.quantize_rows(x, fmt)
    if fmt == "fp8_block" and scope == "row" and axis == -1 and x.dim() == 2 and x.shape[-1] % 16 == 0:
        return cuda.quantize_rows(x, fmt)
    if fmt == "fp8_block" and (scope != "row" or axis == -2):
        return blocks.quantize_squares(x, scope, axis)
    if isinstance(formats.get(fmt), INT4):
        return blocks.quantize_int4(x, fmt)
    return None


def stored(parts: Parts, fmt: str) -> Parts:
    """``Format.stored``: codes and scales as they lie in files, on the wire and in an engine."""
    return cpu.stored(parts, fmt) if _mode == "auto" else formats.get(fmt).stored(parts)


def dequantize(parts: Parts, fmt: str, scope: str, axis: int) -> Tensor | None:
    """``bf16(Format.dequantize)`` from a kernel, or None where there is none for this tensor."""
    if not parts.codes.numel() or not kernels(parts.codes.device):
        return None
    if fmt == "fp8_block" or isinstance(formats.get(fmt), INT4):
        return _dequantize_blocks(parts, fmt, scope, axis)
    if axis != -1 or fmt not in ("nvfp4", "mxfp8") or scope == "tile" or parts.codes.dim() < 2:
        return None
    from swapq.kernels.cuda import quantize as cuda

    if cuda.length(parts, fmt) % 8:
        return None
    scale = None if parts.global_scale is None else parts.global_scale.contiguous()
    return cuda.dequantize(Parts(cuda.aligned(parts.codes), parts.scales.contiguous(), scale), fmt)


def _dequantize_blocks(parts: Parts, fmt: str, scope: str, axis: int) -> Tensor | None:
    form, (codes, scales, _) = formats.get(fmt), parts
    int4, columns = isinstance(form, INT4), axis == -2
    if codes.dtype != (torch.int8 if int4 else form.dtypes["codes"]) or scales.dtype != form.dtypes["scales"]:
        return None
    if scope not in form.scopes or axis not in form.axes or (columns and scope != "row"):
        return None
    if codes.dim() < (2 if columns or scope in ("tile", "halves") else 1):
        return None
    if (scope == "halves" and codes.shape[-2] % 2) or (int4 and codes.shape[-1] % form.block):
        return None
    if tuple(scales.shape) != form.part_shapes(form.logical_shape(codes), scope=scope, axis=axis)["scales"]:
        return None  # it is broadcast, or refused, by the definition
    from swapq.kernels import dequantize_blocks as blocks

    return blocks.dequantize_int4(parts, fmt) if int4 else blocks.dequantize_squares(parts, scope, axis)


def _columns(x: Tensor) -> Parts:
    from swapq.kernels.cuda import columns

    lead, rows = x.shape[:-2], x.shape[-2]
    codes, scales, _ = columns.quantize_columns(x.flatten(0, -2), (rows,) * lead.numel())
    return Parts(codes.view(x.shape), scales.view(*lead, -1, x.shape[-1]))


def choices() -> list[Choice]:
    """The table for this machine."""
    exact = "float64 sums in tiles of fixed height: exact, batch-invariant"
    loops = cpu.available()
    here = [
        Choice(
            "quantize rows and weights",
            "cpu",
            f"torch reference{'; compiled loops for large weights' if loops else ''}",
            "the same bytes" if loops else "numba is not installed, so there are no compiled loops for large weights",
        ),
        Choice("grouped GEMM, forward and backward", "cpu", "torch reference", exact),
        Choice("linear", "cpu", "torch reference", exact),
    ]
    if not torch.cuda.is_available():
        return here
    if not kernels(torch.device("cuda")):
        return here + [Choice(c.work, "cuda", c.implementation, c.note) for c in here]
    same = "one order of float32 sums, whatever the batch: trainer and engine have the same bits"
    return [
        *here,
        Choice("quantize nvfp4, mxfp8, rows of fp8_block", "cuda", "CUDA C++ (NVRTC)", "the reference's bytes"),
        Choice("quantize fp8_block by tiles and columns, int4", "cuda", "Triton", "the reference's bytes"),
        Choice("dequantize nvfp4, mxfp8", "cuda", "CUDA C++ (NVRTC)", "the reference's bytes"),
        Choice("dequantize fp8_block, int4", "cuda", "Triton", "the reference's bytes"),
        Choice("nvfp4, mxfp8 products, few rows", "cuda", "CUDA C++: codes expanded in registers", same),
        Choice("nvfp4, mxfp8 products, many rows", "cuda", "Triton on expanded weights", same),
        Choice("fp8_block, int4 products", "cuda", "Triton on stored codes", same),
        Choice("gradients", "cuda", "torch grouped GEMM", "BF16 operands, float32 sums"),
        Choice("low_precision gradients of fp8_block", "cuda", "Triton on codes", "float32 sums of each slice"),
        Choice("expert_tp slices; low_precision of nvfp4_tile", "cuda", "torch reference", exact),
    ]
