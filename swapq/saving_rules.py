"""The rules by which transformers saves a live model's tensors, without those that a quantizer added while loading.

A checkpoint in FP8 or MXFP4 that transformers dequantized leaves its quantizer's operations among the model's rules. Turned round, they
quantize again what is saved, whatever became of the model: an export, a sync and ``save_pretrained`` would give FP8 codes for live BF16.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

__all__ = ["as_saved", "drop_quantizer", "following"]


def as_saved(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``state`` of ``model`` under the names and in the parts that ``save_pretrained`` writes, values untouched."""
    if not isinstance(model, PreTrainedModel):
        return dict(state)
    rules: list[Any] | None = getattr(model, "_weight_conversions", None)
    kept = _without_quantizer(model, rules)
    if kept is rules:
        return revert_weight_conversion(model, dict(state))
    with following(model, kept):
        return revert_weight_conversion(model, dict(state))


@contextmanager
def following(model: PreTrainedModel, rules: list[Any] | None) -> Iterator[None]:
    """Inside, transformers saves ``model`` by ``rules``; None lets it ask for those of the class."""
    before: list[Any] | None = getattr(model, "_weight_conversions", None)
    _set(model, rules)
    try:
        yield
    finally:
        _set(model, before)


def drop_quantizer(model: nn.Module) -> None:
    """Take what a quantizer added from the rules of ``model`` and of the models inside it."""
    for part in model.modules():
        rules: Any = getattr(part, "_weight_conversions", None)
        if isinstance(part, PreTrainedModel) and rules:
            _set(part, _without_quantizer(part, rules))


def _without_quantizer(model: PreTrainedModel, rules: list[Any] | None) -> list[Any] | None:
    """``rules`` themselves where no quantizer had a part in them; else the class's own converters in the place of its."""
    if not any(hasattr(step, "hf_quantizer") for rule in rules or () for step in getattr(rule, "operations", ())):
        return rules
    own = [rule for rule in get_model_conversion_mapping(model, add_legacy=False) if isinstance(rule, WeightConverter)]
    return [rule for rule in rules or () if not isinstance(rule, WeightConverter)] + own


def _set(model: PreTrainedModel, rules: list[Any] | None) -> None:
    model.__dict__["_weight_conversions"] = rules
