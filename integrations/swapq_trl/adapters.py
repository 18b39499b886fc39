"""LoRA adapters at a weight sync: which are supported, and the model as it is with them merged.

Masters are restored from a copy, bit for bit: adding an adapter and taking it away again would drift a little at every step.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from swapq.errors import UnsupportedError
from swapq.nn.storage import QuantizedStorage

__all__ = ["Merge", "check_adapters", "has_added_adapters", "is_adapted", "merged"]


def is_adapted(model: nn.Module) -> bool:
    """Whether `model` is wrapped by PEFT."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def has_added_adapters(model: nn.Module) -> bool:
    """Whether adapters are in `model` without PEFT's wrapper: those of transformers' `add_adapter`."""
    return not is_adapted(model) and any(type(m).__module__.partition(".")[0] == "peft" for m in model.modules())


def check_adapters(model: Any, *, approximate: bool = False, sharded: bool = False) -> None:
    """Refuse adapters that cannot be sent to the engine as the policy that is trained.

    Args:
        model: the trainer's model, wrapped by PEFT or not.
        approximate: allow LoRA on a quantized linear, where trainer and engine compute different policies.
        sharded: the parameters are sharded (FSDP, ZeRO-3).

    Raises:
        UnsupportedError: with the name of the module and the reason.
    """
    if not is_adapted(model):
        return
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    if sharded:
        raise UnsupportedError(
            "PEFT adapters on a sharded converted model cannot be merged for the engine; train with one process per "
            "replica (DDP), or without adapters"
        )
    for name, config in model.peft_config.items():
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedError(
                f"adapter {name!r} ({config.peft_type}) adds virtual tokens, which the engine does not serve; use LoRA"
            )
    for name, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        if not isinstance(module, LoraLayer):
            raise UnsupportedError(
                f"{name}: {type(module).__name__} adapters cannot be merged for the engine; use LoRA"
            )
        base = module.get_base_layer()
        if isinstance(module, ParamWrapper):
            if isinstance(base, QuantizedStorage):
                raise UnsupportedError(
                    f"{name}: LoRA on a quantized parameter (`target_parameters`) is not supported, since a small change "
                    "of a quantized weight mostly rounds away; leave the experts out of the adapter, or train them fully"
                )
        elif isinstance(base, QuantizedStorage) and not approximate:
            raise UnsupportedError(
                f"{name}: LoRA on a linear that the recipe quantizes: the trainer would compute quantize(W)x + BAx, the "
                "engine quantize(W + BA)x, which are different policies. Exclude it with `exclude_modules`, keep it in "
                "BF16 with the recipe's `keep_bf16`, or accept the difference with `approximate_lora=True`"
            )


class Merge:
    """What merging found out."""

    codes: int = 0
    """Codes of quantized linears that carry an adapter."""
    changed: int = 0
    """How many of them the adapter changes; the rest of its effect rounds away."""

    @property
    def changed_fraction(self) -> float | None:
        """The fraction of those codes that differ from the base's, or None without such a linear."""
        return self.changed / self.codes if self.codes else None


@contextlib.contextmanager
def merged(model: Any, found: Merge | None = None) -> Iterator[Any]:
    """The transformers model with its adapters merged and PEFT's wrapper modules out of the tree, while the context lasts."""
    if not is_adapted(model):
        yield model
        return
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    base = model.get_base_model()
    wrappers = [
        (name, module)
        for name, module in base.named_modules()
        if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper)
    ]
    undo = contextlib.ExitStack()
    with undo, torch.no_grad():
        for name, module in wrappers:
            parent_name, _, leaf = name.rpartition(".")
            parent = base.get_submodule(parent_name)
            if isinstance(module, ModulesToSaveWrapper):
                plain = module.modules_to_save[module.active_adapters[0]]
            else:
                plain = module.get_base_layer()
                _merge_layer(module, plain, undo, found)
            undo.callback(parent._modules.__setitem__, leaf, module)
            parent._modules[leaf] = plain
        yield base


def _merge_layer(module: Any, plain: Any, undo: contextlib.ExitStack, found: Merge | None) -> None:
    """Merge one layer's adapters, and note how to take them back exactly."""
    if module.merged:
        return  # the user merged it: its master is the merged one
    before = plain.quantized()["weight"].codes if isinstance(plain, QuantizedStorage) and found is not None else None
    kept = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}

    def restore() -> None:
        module.merged_adapters.clear()
        for name, parameter in plain.named_parameters():
            parameter.data.copy_(kept[name])

    undo.callback(restore)
    module.merge()
    if before is not None and found is not None:
        after = plain.quantized()["weight"].codes
        found.codes += before.numel()
        found.changed += int((before.view(torch.uint8) != after.view(torch.uint8)).sum())
