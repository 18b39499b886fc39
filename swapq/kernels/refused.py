"""Numbers that no weight, code or scale may be, and which of many tensors hold one, found where the tensors lie."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from swapq.kernels import dispatch

__all__ = ["BY_KERNEL", "REFUSED", "any_refused"]


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


#: what a tensor holds -> where it holds a number that is refused; bool, its shape
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda x: ~torch.isfinite(x),
    "float32": lambda x: ~torch.isfinite(x.to(torch.bfloat16)),  # weights are quantized from BF16
    "e4m3": lambda x: (_bits(x) & 0x7F) == 0x7F,
    "e4m3_scale": lambda x: _bits(x) >= 0x7F,  # NaN, and all below zero
    "e8m0": lambda x: _bits(x) == 0xFF,
    "float32_scale": lambda x: ~((x > 0) & (x < float("inf"))),
    "bf16_scale": lambda x: ~((x > 0) & (x < float("inf"))),
    "int4_pairs": lambda x: ((_bits(x) & 0xF) == 8) | ((_bits(x) >> 4) == 8),  # -8, outside the symmetric range
}
#: those that a kernel finds -> their place in refused.cu
BY_KERNEL = {kind: i for i, kind in enumerate(list(REFUSED)[:6])}


def any_refused(tensors: Sequence[Tensor], kinds: Sequence[str]) -> Tensor:
    """Bool ``[n]``, on the tensors' device: which of `tensors` hold a number that is refused. Nothing waits for the device.

    Args:
        tensors: at least one, all on one device.
        kinds: of each its key in :data:`REFUSED`.
    """
    if dispatch.kernels(tensors[0].device) and all(kind in BY_KERNEL for kind in kinds):
        from swapq.kernels.cuda.refused import any_refused as launch

        return launch(tensors, [BY_KERNEL[kind] for kind in kinds])
    return torch.stack([REFUSED[kind](x).any() for x, kind in zip(tensors, kinds, strict=True)])
