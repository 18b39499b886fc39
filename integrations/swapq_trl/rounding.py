"""The trainer's forward with the weights that the engine holds: what a recipe leaves unquantized is BF16 there.

Autocast rounds the operands of matrix products only. With FP32 masters the embedding, and with it the whole residual stream, and
the norms' weights stay FP32 in the trainer: another policy than the engine's, and every quantizer downstream sees other inputs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from swapq.nn.storage import QuantizedStorage

__all__ = ["round_as_served"]


def round_as_served(model: nn.Module) -> list[RemovableHandle]:
    """Under BF16 autocast, compute embeddings and norms with their FP32 weights rounded to BF16; gradients reach the masters.

    Matrix products are left to autocast, which rounds the same way, and swapped modules round and quantize their own masters.
    The hooks run again when a checkpointed layer is recomputed. Returns their handles.
    """
    handles: list[RemovableHandle] = []
    for module in model.modules():
        rounds_itself = isinstance(module, QuantizedStorage) and not module.trains_in_bf16
        if isinstance(module, nn.Linear) or rounds_itself or not any(True for _ in module.parameters(recurse=False)):
            continue
        rounding = _Rounding()
        handles.append(module.register_forward_pre_hook(rounding.before))
        handles.append(module.register_forward_hook(rounding.after, always_call=True))
    return handles


class _Rounding:
    """Puts rounded weights in the place of one module's masters for the length of a forward."""

    def __init__(self) -> None:
        self.masters: list[dict[str, nn.Parameter]] = []

    def before(self, module: nn.Module, args: Any) -> None:
        taken: dict[str, nn.Parameter] = {}
        self.masters.append(taken)
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.dtype != torch.float32 or not _autocasts(parameter):
                continue
            taken[name] = parameter
            module._parameters[name] = parameter.to(torch.bfloat16)  # type: ignore[assignment]

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.masters:
            module._parameters.update(self.masters.pop())


def _autocasts(tensor: Tensor) -> bool:
    """Whether matrix products on the tensor's device are computed in BF16 now."""
    kind = tensor.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
