"""What no quantizer writes, found in codes and scales before they are served."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swapq import formats
from swapq.kernels.refused import REFUSED, any_refused

__all__ = ["Stored", "any_damage", "any_unsound", "can_be_unsound", "unsound"]


class Stored(NamedTuple):
    """One stored part of tensors in a format: ``"codes"``, ``"scales"`` or ``"global_scale"``."""

    tensor: Tensor
    fmt: str
    part: str


def _refused(fmt: str, part: str) -> str | None:
    """What is refused there (a key of ``REFUSED``); None where every byte is one that a quantizer writes: every E2M1 code is a number."""
    dtype = formats.get(fmt).dtypes[part]
    if dtype in (torch.float32, torch.bfloat16):
        return "float32_scale" if dtype == torch.float32 else "bf16_scale"
    if dtype == torch.float8_e4m3fn:
        return "e4m3_scale" if part == "scales" else "e4m3"
    if part == "scales":
        return "e8m0"
    return "int4_pairs" if fmt.startswith("int4") else None


def can_be_unsound(fmt: str, part: str) -> bool:
    """Whether some byte of that part is one that no quantizer writes: every E2M1 code is a number, and the largest part of a model."""
    return _refused(fmt, part) is not None


def unsound(x: Tensor, fmt: str, part: str) -> Tensor:
    """Where ``x`` holds NaN, Inf or a block scale below zero; bool, shape of ``x``. The arguments are those of :class:`Stored`."""
    kind = _refused(fmt, part)
    return torch.zeros_like(x, dtype=torch.bool) if kind is None else REFUSED[kind](x)


def any_unsound(stored: Sequence[Stored]) -> Tensor:
    """0-dim bool on the device of all of ``stored``: whether :func:`unsound` finds something in one. Nothing waits for the device."""
    kinds = [_refused(each.fmt, each.part) for each in stored]
    looked = [(each.tensor, kind) for each, kind in zip(stored, kinds, strict=True) if kind is not None]
    if not looked:
        return torch.zeros((), dtype=torch.bool, device=stored[0].tensor.device)
    tensors, found = zip(*looked, strict=True)
    return any_refused(tensors, found).any()


def any_damage(looked: Sequence[tuple[Any, Any]]) -> Tensor:
    """0-dim bool on the device: whether ``require_sound`` of a method would raise for its layer. Nothing waits for the device.

    Args:
        looked: at least one layer and its method (``stored`` and ``disagrees`` say what is looked at).
    """
    apart = [method.disagrees(layer) for layer, method in looked]
    flags = [each.any() for each in apart if each is not None]
    flags.append(any_unsound([stored for layer, method in looked for stored in method.stored(layer)]))
    return torch.stack(flags).any()
