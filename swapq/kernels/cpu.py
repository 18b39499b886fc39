"""Fast quantizers of BF16 matrices on the CPU, for converting checkpoints: the bytes of the reference, compiled where numba is installed.

Values must be finite: the caller checks the amax, as it must anyway to name the tensor (contract section 0).
"""

import importlib.util
from collections.abc import Callable, Iterable
from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from swapq import formats
from swapq.formats import Parts
from swapq.formats.nvfp4 import NVFP4, ONE_SIXTH
from swapq.kernels.host import as_array

__all__ = ["Empty", "available", "bf16_amax", "compiled", "prepare", "quantize_matrix", "quantize_weights", "stored"]

#: gives memory of a shape and dtype on the CPU, uninitialized
Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
#: from so many values on, loading numba and its compiled loops pays
_MANY = 1 << 20
#: formats with compiled loops
_COMPILED = ("nvfp4", "mxfp8", "fp8_block", "int4", "int4_g32")
#: what the loops write scales as, where it is not a byte
_SCALES = {"fp8_block": torch.float32, "int4": torch.uint16, "int4_g32": torch.uint16}


def available() -> bool:
    """Whether the compiled loops can be loaded: numba is installed."""
    return importlib.util.find_spec("numba") is not None


@cache
def compiled() -> ModuleType | None:
    """The compiled loops, or None where numba is not installed."""
    if not available():
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


def prepare(fmts: Iterable[str] = _COMPILED) -> None:
    """Load (the first time on a machine: compile) the loops of ``fmts`` now, in this thread, so that no worker waits for it."""
    x = torch.zeros(1, 128, dtype=torch.bfloat16, device="cpu")
    bf16_amax(x)
    for fmt in fmts:
        stored(quantize_matrix(x, fmt), fmt, _empty)


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
    empty: Empty = _empty,
) -> Parts:
    """Codes and scales of a finite, contiguous BF16 matrix ``[N, K]``; NVFP4 takes the scope's float32 ``amax`` (tensor scope).

    ``empty`` gives the memory that compiled loops write to.
    """
    loops, form = compiled(), formats.get(fmt)
    if loops is None or fmt not in _COMPILED or not x.numel():
        return form.quantize(x, scope=form.default_scope, axis=-1, amax=amax)
    form.check_length(x.shape[-1])
    scales = empty(form.part_shapes(tuple(x.shape), scope=form.default_scope)["scales"], _SCALES.get(fmt, torch.uint8))
    if fmt == "nvfp4":
        encode, decode = NVFP4.global_scales(bf16_amax(x) if amax is None else amax)
        codes = empty((x.shape[0], x.shape[1] // 2), torch.uint8)
        factors = np.float32((encode * ONE_SIXTH).item()), np.float32(decode.item())
        loops.nvfp4(_bits(x), *factors, _flat(codes), _flat(scales))
        return Parts(codes, scales.view(torch.float8_e4m3fn), decode)
    codes = empty((x.shape[0], x.shape[1]), torch.uint8)
    if fmt == "mxfp8":
        loops.mxfp8(_bits(x), _flat(codes), _flat(scales))
    elif fmt == "fp8_block":
        loops.fp8_block(_bits(x), x.shape[1], _flat(codes), _flat(scales))
    else:
        loops.int4(_bits(x), form.block, _flat(codes), _flat(scales))
        return Parts(codes.view(torch.int8), scales.view(torch.bfloat16))
    return Parts(codes.view(torch.float8_e4m3fn), scales)


def quantize_weights(x: Tensor, fmt: str, amax: Tensor | None = None, *, scope: str | None = None) -> Parts | None:
    """The reference's bytes of large BF16 weights ``[..., N, K]`` on the CPU in the format's ``scope`` of weights, or in ``halves``; one
    FP32 scale per leading index in NVFP4.

    None where the compiled loops have nothing to offer: few values, no numba, another format or scope, or a value that is not finite,
    whose way through the contract is the reference's.
    """
    if x.numel() < _MANY or fmt not in _COMPILED or compiled() is None:
        return None
    if scope == "halves":
        parts = quantize_weights(x.unflatten(-2, (2, -1)), fmt, amax)
        return None if parts is None else Parts(parts.codes.flatten(-3, -2), parts.scales.flatten(-3, -2))
    if scope not in (None, formats.get(fmt).default_scope):
        return None
    x = x.contiguous()
    if not bool(torch.isfinite(bf16_amax(x))) or (amax is not None and not bool(torch.isfinite(amax).all())):
        return None
    form, lead = formats.get(fmt), x.shape[:-2]
    shapes = form.part_shapes(tuple(x.shape), scope=form.default_scope)
    if not form.shares_scale and x.shape[-2] % form.tile_rows == 0:  # no scale reaches from one matrix into the next
        flat = quantize_matrix(x.flatten(0, -2), fmt)
        return Parts(flat.codes.view(x.shape), flat.scales.view(shapes["scales"]))
    tops = [None] * lead.numel() if amax is None else [*amax.reshape(-1)]
    each = [quantize_matrix(m, fmt, top) for m, top in zip(x.reshape(-1, *x.shape[-2:]), tops, strict=True)]
    codes = torch.stack([parts.codes for parts in each]).view(shapes["codes"])
    scales = torch.stack([parts.scales for parts in each]).view(shapes["scales"])
    decodes = [parts.global_scale for parts in each if parts.global_scale is not None]
    return Parts(codes, scales, torch.stack(decodes).view(lead) if decodes else None)


def stored(parts: Parts, fmt: str, empty: Empty | None = None) -> Parts:
    """``Format.stored``. Codes on the CPU are packed in a compiled loop if they are many, or where ``empty`` gives the memory for it."""
    form, codes = formats.get(fmt), parts.codes
    wanted = form.packs and codes.device.type == "cpu" and (empty is not None or codes.numel() >= _MANY)
    loops = compiled() if wanted else None
    if loops is None:
        return form.stored(parts)
    into = (empty or _empty)((*codes.shape[:-1], codes.shape[-1] // 2), torch.uint8)
    loops.packed(as_array(codes.contiguous().reshape(-1).view(torch.uint8)), _flat(into))
    return parts._replace(codes=into)


def _flat(x: Tensor) -> np.ndarray:
    """Memory to write to."""
    return x.numpy().reshape(-1)


def _bits(x: Tensor) -> np.ndarray:
    return as_array(x.detach().reshape(-1).view(torch.int16)).view(np.uint16)
