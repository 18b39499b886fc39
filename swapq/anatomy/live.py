"""Anatomy of a live model: parameters and persistent buffers under their own names, experts checked against their module's attributes."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from swapq.anatomy.assemble import Raw, assemble
from swapq.anatomy.config import as_dict, model_type
from swapq.anatomy.family import FAMILIES, Family
from swapq.anatomy.tensor import Anatomy, ExpertsLayout, Quantization
from swapq.errors import AnatomyError

__all__ = ["of_model"]

#: class attribute of transformers' experts modules -> the family's word for it
_ATTRIBUTES = (
    ("has_gate", lambda family: family.gated),
    ("has_bias", lambda family: family.has_bias),
    ("is_transposed", lambda family: family.transposed),
    ("is_concatenated", lambda family: not family.interleaved),
)


def of_model(model: nn.Module) -> Anatomy:
    """Anatomy of a live model, converted by swapq or not; works on the meta device.

    A tensor that has two names (tied embeddings) appears once. A module that carries ``swapq_layout`` is taken at its word.

    Raises:
        AnatomyError: an unknown family with experts, an experts module whose attributes contradict its family, or tensors that
            disagree with the config.
    """
    config = as_dict(getattr(model, "config", None))
    kind = model_type(config)
    family = FAMILIES.get(kind)
    modules = dict(model.named_modules())
    given: dict[str, ExpertsLayout] = {}
    for name, module in modules.items():
        layout = getattr(module, "swapq_layout", None)
        if isinstance(layout, ExpertsLayout):
            given[name] = replace(layout, prefix=name)  # a wrapper may have put a part in front of the name
        elif family is not None and _is_fused_experts(module):
            _check_attributes(name, module, family)
    raws = list(_raws(modules))
    return assemble(
        raws,
        config,
        source="model",
        where=type(model).__name__,
        module_list=True,
        quantization=_quantization(raws, modules, config),
        given=given,
    )


def _raws(modules: Mapping[str, nn.Module]) -> Iterator[Raw]:
    seen: set[int] = set()
    for prefix, module in modules.items():
        held: dict[str, Tensor | None] = {**module._parameters}
        held.update((k, v) for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set)
        for leaf, tensor in held.items():
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            owner = _is_linear(module) or tensor.dim() != 2
            name = f"{prefix}.{leaf}" if prefix else leaf
            packed = type(tensor).__name__ if type(tensor).__module__.startswith("torchao.") else ""
            yield Raw(name, tuple(tensor.shape), tensor.dtype, owner, packed)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (hasattr(module, "in_features") and hasattr(module, "out_features"))


def _is_fused_experts(module: nn.Module) -> bool:
    return any(
        p is not None and p.dim() == 3 and name in ("gate_up_proj", "up_proj", "down_proj")
        for name, p in module._parameters.items()
    )


def _check_attributes(name: str, module: nn.Module, family: Family) -> None:
    for attribute, meaning in _ATTRIBUTES:
        stated = getattr(module, attribute, None)
        if isinstance(stated, bool) and stated != meaning(family):
            raise AnatomyError(
                f"{name} ({type(module).__name__}) says {attribute} = {stated}; experts of model_type {family.name!r} have "
                f"{meaning(family)}: this is another layout than the one that swapq knows"
            )


def _quantization(
    raws: list[Raw], modules: Mapping[str, nn.Module], config: Mapping[str, object]
) -> Quantization | None:
    """What the stored dtypes say. A config alone does not count: a live model may have been dequantized on load."""
    low = next((r for r in raws if len(r.shape) >= 2 and (r.dtype in _CODES or r.packed)), None)
    if low is None:
        return None
    entry = config.get("quantization_config")
    entry = entry if isinstance(entry, Mapping) else {}
    method = str(entry.get("quant_method") or "undeclared")
    if type(modules[low.name.rpartition(".")[0]]).__module__.partition(".")[0] == "swapq":
        method = "swapq"
    if low.packed and method == "undeclared":
        method = "torchao"
    return Quantization(method, f"{low.name} ({low.packed or low.dtype})", entry)


_CODES = (torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)
