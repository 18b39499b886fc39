"""The module swap: ``swapq.convert`` turns a model's experts and linears, in place, into modules that compute in the recipe's formats.

Invariant: nothing is changed until the plan has accepted the model. Parameters keep their names; trainable masters stay plain tensors.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from swapq.anatomy import ExpertsLayout
from swapq.errors import PlanError, UnsupportedError
from swapq.formats import get
from swapq.nn.experts import SwapqExperts
from swapq.nn.functional import LinearSpec
from swapq.nn.gather import whole
from swapq.nn.linear import SwapqLinear
from swapq.nn.storage import QuantizedStorage
from swapq.plan import Plan, plan
from swapq.qtensor import require_finite
from swapq.recipe import Recipe
from swapq.saving_rules import drop_quantizer

__all__ = ["convert", "frozen_weights", "is_converted", "plan_of", "recipe_of", "swapped_modules"]

M = TypeVar("M", bound=nn.Module)
_MARK = "swapq_plan"


def convert(
    model: M,
    recipe: "str | Recipe | Mapping[str, Any] | os.PathLike[str]" = "nvfp4-rl",
    *,
    trainable: bool = True,
    **overrides: Any,
) -> M:
    """Swap, in place, every module that the recipe quantizes, and return the model.

    Args:
        model: a causal LM with MoE experts (or, for recipes that quantize linears, any model whose family is known).
        recipe: a name, a Recipe, its dictionary, or a JSON file of one.
        trainable: keep masters and quantize them in each forward. False keeps codes and scales only.
        overrides: fields of the recipe to replace, e.g. ``backward="high_precision"``, ``last_layers_bf16=0``.

    Raises:
        RecipeError, AnatomyError, PlanError: see :func:`swapq.plan`.
        FormatError: a weight that is not finite, by name.
        UnsupportedError: no model, such as a folder; a model that is converted already, or wrapped in hooks that would bypass the swap; a
            weight that two modules share; a linear with a forward of its own.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"convert takes a model, got {type(model).__name__} {model!r:.80}; a folder becomes another with swapq.convert_checkpoint, or "
            "a model with from_pretrained"
        )
    if is_converted(model):
        raise UnsupportedError(
            f"the model is converted already, to {recipe_of(model).name!r}; load it afresh to convert it otherwise"
        )
    the_plan = plan(model, Recipe.resolve(recipe, **overrides))
    apply_plan(model, the_plan, trainable=trainable)
    drop_quantizer(model)
    if trainable:
        _forget_old_quantization(model)
    return model


def _forget_old_quantization(model: nn.Module) -> None:
    """Drop what the config says of a quantized source: the plan found plain weights, and ``save_pretrained`` writes masters."""
    config = getattr(model, "config", None)
    parts = (config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))) if hasattr(config, "to_dict") else ()
    for part in parts:
        for key in ("quantization_config", "compression_config"):
            if key in vars(part):
                delattr(part, key)


def apply_plan(model: M, the_plan: Plan, *, trainable: bool = True, check: bool = True) -> M:
    """Carry out a plan of ``model``. ``check=False`` leaves values alone (a model on the meta device)."""
    recipe = the_plan.recipe
    entries = {entry.name: entry for entry in the_plan if entry.format != "bf16"}
    formats = {name: entry.format for name, entry in entries.items()}
    modules = dict(model.named_modules())
    fused = {
        f"{layout.prefix}.{name}": layout
        for layout in the_plan.anatomy.experts
        if layout.kind == "fused"
        for name in _weights(layout)
    }
    linears = [name for name in formats if name not in fused]
    for name in linears:
        _check_swappable(modules, name.removesuffix(".weight"), nn.Linear)
    for layout in {id(v): v for k, v in fused.items() if k in formats}.values():
        _check_swappable(modules, layout.prefix, nn.Module)
    _check_unshared(model, formats)
    if check:
        for name in formats:
            owner, _, leaf = name.rpartition(".")
            require_finite(whole(getattr(modules[owner], leaf)), name)

    done: set[str] = set()
    for name, fmt in formats.items():
        spec = LinearSpec(fmt, recipe.activations_of(entries[name].role), recipe.backward)
        if name not in fused:
            owner = name.removesuffix(".weight")
            SwapqLinear.adopt(modules[owner], spec, the_plan.anatomy.hub_name(name))
        elif fused[name].prefix not in done:
            done.add(fused[name].prefix)
            SwapqExperts.adopt(modules[fused[name].prefix], fused[name], spec, expert_tp=recipe.expert_tp)
    for layout in the_plan.anatomy.experts:
        if layout.kind == "modulelist" and layout.gated:
            _pair(modules, layout, formats)
    setattr(model, _MARK, the_plan)
    if not trainable:
        for module in swapped_modules(model):
            module.freeze()
        if isinstance(model, PreTrainedModel):
            from swapq.hf.quantizer import attach  # the hf package sits above this file

            attach(model)
    return model


def _weights(layout: ExpertsLayout) -> list[str]:
    return [name for name in (layout.gate_up_name, layout.up_name, layout.down_name) if name]


def _check_unshared(model: nn.Module, formats: dict[str, str]) -> None:
    """A weight with a second name would be quantized under one of the two and stay high-precision under the other."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for found in names.values():
        if len(found) > 1 and any(name in formats for name in found):
            raise UnsupportedError(
                f"{found[0]} and {found[1]} are one parameter, and a quantized weight has one name; give each its own copy before "
                "converting, or keep both in BF16 (`keep_bf16`)"
            )


def _check_swappable(modules: dict[str, nn.Module], owner: str, kind: type[nn.Module]) -> None:
    module = modules.get(owner)
    if module is None or not isinstance(module, kind):
        raise PlanError(
            f"{owner}: expected {kind.__name__}, found {type(module).__name__}; convert the plain model before wrapping or quantizing it"
        )
    if kind is nn.Linear and type(module).forward is not nn.Linear.forward:
        raise UnsupportedError(
            f"{owner}: {type(module).__name__} is a linear with a forward of its own, which the swap would drop; add "
            f"{owner.rpartition('.')[2]!r} to keep_bf16"
        )
    if "forward" in vars(module):
        raise UnsupportedError(
            f"{owner}: its forward is wrapped (by accelerate hooks, say) and would bypass the swap; convert before that"
        )


def _pair(modules: dict[str, nn.Module], layout: ExpertsLayout, formats: dict[str, str]) -> None:
    """Gate and up of one expert share their FP32 scale."""
    for expert in range(layout.num_experts):
        gate, up = (modules.get(f"{layout.prefix}.{expert}.{name}") for name in (layout.hub_gate, layout.hub_up))
        if isinstance(gate, SwapqLinear) and isinstance(up, SwapqLinear) and get(gate.spec.weights).shares_scale:
            gate.pair_with(up)


def swapped_modules(model: nn.Module) -> Iterator[QuantizedStorage]:
    """Every module that convert swapped."""
    return (m for m in model.modules() if isinstance(m, QuantizedStorage))


def plan_of(model: nn.Module) -> Plan:
    """The plan that convert carried out, also of a wrapped model (DDP, FSDP, PEFT, compile).

    Raises:
        UnsupportedError: the model is not converted.
    """
    for module in model.modules():
        if _MARK in vars(module):
            return vars(module)[_MARK]
    raise UnsupportedError("the model is not converted; call swapq.convert(model, recipe) first")


def is_converted(model: nn.Module) -> bool:
    """Whether ``swapq.convert`` has been called on the model (also with the recipe ``bf16``, which swaps nothing)."""
    return any(_MARK in vars(module) for module in model.modules())


def recipe_of(model: nn.Module) -> Recipe:
    """The recipe of a converted model.

    Raises:
        UnsupportedError: the model is not converted.
    """
    return plan_of(model).recipe


@contextmanager
def frozen_weights(model: nn.Module) -> Iterator[None]:
    """Quantize each master once inside the context instead of in every forward.

    Masters must not change inside: gradient accumulation and scoring are its uses, an optimizer step is not. Leaving drops the codes.
    """
    modules = list(swapped_modules(model))
    outer = [module.frozen for module in modules]
    for module, before in zip(modules, outer, strict=True):
        module.frozen = {} if before is None else before
    try:
        yield
    finally:
        for module, before in zip(modules, outer, strict=True):
            module.frozen = before
