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
from swapq.kernels.host import as_array

__all__ = ["bf16_amax", "compiled", "prepare", "quantize_matrix", "quantize_weights"]

#: from so many values on, loading numba and its compiled loops pays
_MANY = 1 << 20


@cache
def compiled() -> ModuleType | None:
    """The compiled loops, or None where numba is not installed."""
    if importlib.util.find_spec("numba") is None:
        return None
    from swapq.kernels import compiled as loops

    _answer_no_special_names()
    return loops


def _answer_no_special_names() -> None:
    """Let a vLLM CPU engine start in a process that has loaded numba.

    The engine asks every object in every module for its ``__dict__``. llvmlite's library object answers any name with a C function,
    this one too, and the engine falls over it. Names with underscores are no functions of that library.
    """
    from llvmlite.binding import ffi

    library = type(ffi.lib)
    asked = getattr(library, "__getattr__", None)
    if asked is None or asked.__module__ == __name__:
        return

    def answer(self: object, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return asked(self, name)

    library.__getattr__ = answer


def prepare() -> None:
    """Load (the first time on a machine: compile) the loops now, in this thread, so that no worker waits for it."""
    for fmt in ("nvfp4", "mxfp8"):
        quantize_matrix(torch.zeros(1, 32, dtype=torch.bfloat16, device="cpu"), fmt)


def bf16_amax(x: Tensor) -> Tensor:
    """float32 0-dim amax of contiguous BF16 ``x``. NaN and Inf show."""
    loops = compiled()
    if loops is None:
        return x.abs().amax().float()
    top = int(loops.amax(_bits(x))) if x.numel() else 0
    return torch.tensor([top], dtype=torch.int16, device="cpu").view(torch.bfloat16)[0].float()


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


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


def quantize_weights(x: Tensor, fmt: str, amax: Tensor | None = None) -> Parts | None:
    """The reference's bytes of large BF16 weights ``[..., N, K]`` on the CPU, one FP32 scale per leading index in NVFP4.

    None where the compiled loops have nothing to offer: few values, no numba, another format, or a value that is not finite, whose
    way through the contract is the reference's.
    """
    if x.numel() < _MANY or fmt not in ("nvfp4", "mxfp8") or compiled() is None:
        return None
    x = x.contiguous()
    if not bool(torch.isfinite(bf16_amax(x))) or (amax is not None and not bool(torch.isfinite(amax).all())):
        return None
    if fmt == "mxfp8":
        flat = quantize_matrix(x.flatten(0, -2), fmt)
        return Parts(flat.codes.view(x.shape), flat.scales.view(*x.shape[:-1], -1))
    lead = x.shape[:-2]
    tops = [None] * lead.numel() if amax is None else [*amax.reshape(-1)]
    each = [quantize_matrix(m, fmt, top) for m, top in zip(x.reshape(-1, *x.shape[-2:]), tops, strict=True)]
    codes, scales, decode = (torch.stack([parts[i] for parts in each]) for i in range(3))  # type: ignore[misc]
    return Parts(codes.view(*lead, *codes.shape[1:]), scales.view(*lead, *scales.shape[1:]), decode.view(lead))


def _bits(x: Tensor) -> np.ndarray:
    return as_array(x.detach().reshape(-1).view(torch.int16)).view(np.uint16)
