"""Fast quantizers of BF16 matrices on the CPU, for converting checkpoints: the bytes of the reference, compiled where numba is installed.

Values must be finite: the caller checks the amax, as it must anyway to name the tensor (contract section 0).
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from swapq import formats
from swapq.formats import Parts
from swapq.formats.nvfp4 import NVFP4, ONE_SIXTH

__all__ = ["bf16_amax", "compiled", "prepare", "quantize_matrix"]


@cache
def compiled() -> ModuleType | None:
    """The compiled loops, or None where numba is not installed."""
    if importlib.util.find_spec("numba") is None:
        return None
    from swapq.kernels import compiled as loops

    return loops


def prepare() -> None:
    """Load (the first time on a machine: compile) the loops now, in this thread, so that no worker waits for it."""
    for fmt in ("nvfp4", "mxfp8"):
        quantize_matrix(torch.zeros(1, 32, dtype=torch.bfloat16), fmt)


def bf16_amax(x: Tensor) -> Tensor:
    """float32 0-dim amax of contiguous BF16 ``x``. NaN and Inf show."""
    loops = compiled()
    if loops is None:
        return x.abs().amax().float()
    top = int(loops.amax(_bits(x))) if x.numel() else 0
    return torch.tensor([top], dtype=torch.int16).view(torch.bfloat16)[0].float()


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def quantize_matrix(
    x: Tensor,
    fmt: str,
    amax: Tensor | None = None,
    *,
    empty: Callable[[tuple[int, ...], torch.dtype], Tensor] = _empty,
) -> Parts:
    """Codes and scales of a finite, contiguous BF16 matrix ``[N, K]``; NVFP4 takes the scope's float32 ``amax`` (tensor scope).

    ``empty`` gives the memory that compiled loops write to.
    """
    loops, form = compiled(), formats.get(fmt)
    if loops is None or fmt not in ("nvfp4", "mxfp8"):
        return form.quantize(x, scope=form.default_scope, axis=-1, amax=amax)
    form.check_length(x.shape[-1])
    shapes = form.part_shapes(tuple(x.shape), scope=form.default_scope)
    codes, scales = (empty(shapes[part], torch.uint8) for part in ("codes", "scales"))
    flat = codes.numpy().reshape(-1), scales.numpy().reshape(-1)
    if fmt == "mxfp8":
        loops.mxfp8(_bits(x), *flat)
        return Parts(codes.view(torch.float8_e4m3fn), scales)
    encode, decode = NVFP4.global_scales(bf16_amax(x) if amax is None else amax)
    loops.nvfp4(_bits(x), np.float32((encode * ONE_SIXTH).item()), np.float32(decode.item()), *flat)
    return Parts(codes, scales.view(torch.float8_e4m3fn), decode)


def _bits(x: Tensor) -> np.ndarray:
    return x.reshape(-1).view(torch.int16).numpy().view(np.uint16)
