"""The quantizer that transformers calls: it swaps the modules of the empty model, and fills them after the rest is loaded."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from swapq.checkpoint.tensors import quantization_config, quantized_names, saved_state
from swapq.convert import apply_plan, convert, swapped_modules
from swapq.errors import CheckpointError
from swapq.headers import TensorHeader
from swapq.hf.config import SwapqConfig
from swapq.hf.foreign import ForeignConfig, recipe_for
from swapq.hf.loading import fill, headers_of
from swapq.plan import plan
from swapq.recipe import Recipe

__all__ = ["SwapqHfQuantizer", "attach"]


@register_quantizer("modelopt")
@register_quantizer("swapq-foreign")
@register_quantizer("swapq")
class SwapqHfQuantizer(HfQuantizer):
    """Loads a quantized checkpoint into modules that hold codes, or converts a plain one after it is loaded."""

    requires_calibration = False
    quantization_config: SwapqConfig | ForeignConfig

    def __init__(self, quantization_config: SwapqConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.headers: Mapping[str, tuple[str, TensorHeader]] = {}

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        if not self.pre_quantized:
            return model
        files: Sequence[str] = kwargs.get("checkpoint_files") or ()
        self.headers = headers_of(files)  # damaged files are named before anything is loaded
        config = self.quantization_config
        if isinstance(config, ForeignConfig):
            listed = _by_format(config.quantized(self.headers), model)
            recipe = recipe_for(model, {name: fmt for fmt, names in listed.items() for name in names})
            self._prepare(model, recipe, listed)
            return model
        if config.quantized is None:
            raise CheckpointError(
                "quantization_config: `quantized`, the list of quantized weights, is missing; convert the checkpoint again"
            )
        self._prepare(model, config.recipe, _strip(config.quantized, model))
        return model

    def _prepare(self, model: PreTrainedModel, recipe: Recipe, listed: dict[str, list[str]]) -> None:
        """Swap the modules of the empty model, for what the list says and nothing else."""
        apply_plan(model, plan(model, recipe), check=False)
        _compare(listed, quantized_names(model))
        for module in swapped_modules(model):
            module.allocate()
            module._is_hf_initialized = True  # type: ignore[assignment]  # transformers must not draw random values into codes
        _hide(model)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        if isinstance(self.quantization_config, ForeignConfig):
            fill(model, self.headers, self.quantization_config.layout)
            self.headers = {}
            attach(model)  # from here on it is a swapq model, also when saved
            return model
        if not self.pre_quantized:
            convert(model, self.quantization_config.recipe, trainable=self.quantization_config.trainable)
            if self.quantization_config.trainable:
                self.remove_quantization_config(model)  # masters are saved: an ordinary checkpoint
            else:
                attach(model)
            return model
        fill(model, self.headers)
        self.headers = {}
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        return saved_state(model), {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters beside the codes; the codes themselves never train

    @property
    def is_qat_trainable(self) -> bool:
        return False


def attach(model: PreTrainedModel) -> None:
    """Make ``save_pretrained`` of a model that holds codes write them, with the config that loads them again."""
    config = SwapqConfig(**quantization_config(model))
    model.config.quantization_config = config
    model.hf_quantizer = SwapqHfQuantizer(config, pre_quantized=True)  # type: ignore[assignment]
    model.is_quantized = True  # type: ignore[assignment]
    model.quantization_method = "swapq"  # type: ignore[assignment]


def _strip(listed: dict[str, list[str]], model: PreTrainedModel) -> dict[str, list[str]]:
    """The list as a base model without its head spells it."""
    prefix = f"{model.base_model_prefix}."
    if model.base_model is not model:
        return listed
    return {fmt: [name.removeprefix(prefix) for name in names] for fmt, names in listed.items()}


def _by_format(quantized: Mapping[str, str], model: PreTrainedModel) -> dict[str, list[str]]:
    listed: dict[str, list[str]] = {}
    for name, fmt in quantized.items():
        listed.setdefault(fmt, []).append(name)
    return _strip(listed, model)


def _compare(listed: dict[str, list[str]], planned: dict[str, list[str]]) -> None:
    for fmt in sorted(set(listed) | set(planned)):
        there, here = set(listed.get(fmt, ())), set(planned.get(fmt, ()))
        for names, what in ((there - here, "lists"), (here - there, "does not list")):
            if names:
                raise CheckpointError(
                    f"quantization_config {what} {sorted(names)[0]} as {fmt} ({len(names)} such weights), which its own recipe "
                    "contradicts; the config was edited or written by another version, convert the checkpoint again"
                )


def _hide(model: PreTrainedModel) -> None:
    """Tell transformers' loading report that the quantized tensors are ours."""
    prefixes = [name for name, module in model.named_modules() if module in set(swapped_modules(model))]
    patterns = {rf"(^|\.){re.escape(prefix)}\." for prefix in prefixes} | {
        rf"(^|\.){re.escape(p)}\." for p in _hub_prefixes(model)
    }
    model._keys_to_ignore_on_load_missing = set(model._keys_to_ignore_on_load_missing or ()) | patterns
    model._keys_to_ignore_on_load_unexpected = set(model._keys_to_ignore_on_load_unexpected or ()) | patterns


def _hub_prefixes(model: PreTrainedModel) -> set[str]:
    layouts = (getattr(module, "swapq_layout", None) for module in swapped_modules(model))
    return {layout.hub_prefix for layout in layouts if layout is not None}
