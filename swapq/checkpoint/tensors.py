"""The tensors of a converted model under their checkpoint names. Export, sync, digest and save all read this one list.

Invariant: an expert's gate and up carry one FP32 scale; E8M0 scales are uint8; every tensor is detached and every quantized one is fresh.
"""

import os
import re
from collections.abc import Callable, Container, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from swapq import formats
from swapq.checkpoint.layouts.swapq import describe
from swapq.checkpoint.stacks import refuse_interleaved, stacked_tensors
from swapq.convert import is_converted, plan_of, swapped_modules
from swapq.errors import UnsupportedError
from swapq.formats import Format
from swapq.headers import read_folder
from swapq.nn.experts import SwapqExperts
from swapq.nn.gather import whole
from swapq.nn.linear import SwapqLinear
from swapq.nn.storage import QuantizedStorage, part_names
from swapq.qtensor import finite_flags, is_finite, require_finite
from swapq.saving_rules import as_saved

__all__ = ["base_model", "checkpoint_tensors", "named_tensors", "quantization_config", "quantized_names"]

#: name by which it is sorted, and what gives its tensors
Unit = tuple[str, Callable[[], Iterator[tuple[str, Tensor]]]]
#: live name and module
Swapped = list[tuple[str, QuantizedStorage]]

#: model -> live names, and Hub name -> live name of the same tensor
_renamed: "WeakKeyDictionary[nn.Module, tuple[tuple[str, ...], dict[str, str]]]" = WeakKeyDictionary()


def base_model(model: nn.Module) -> nn.Module:
    """The model inside DDP, FSDP1 and ``torch.compile`` wrappers.

    Raises:
        UnsupportedError: a PEFT model, whose adapters would be left out.
    """
    while True:
        if hasattr(model, "peft_config") and hasattr(model, "base_model") and not isinstance(model, PreTrainedModel):
            raise UnsupportedError(
                "the model carries PEFT adapters, which a checkpoint of the base would leave out; merge them first"
            )
        inner = getattr(model, "_orig_mod", None) or (
            getattr(model, "module", None) if not isinstance(model, PreTrainedModel) else None
        )
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _expert_tensors(module: SwapqExperts) -> Iterator[tuple[str, Tensor]]:
    """Codes and scales of each expert in the order gate, up, down."""
    layout = module.swapq_layout
    refuse_interleaved(layout)
    form = formats.get(module.spec.weights)
    first, down = module.stored_parts(module.up_name), module.stored_parts(module.down_name)
    half = -(-layout.intermediate // form.tile_rows)  # rows of block scales in gate, and in up
    for expert in range(layout.num_experts):
        for projection in layout.projections:
            weight = layout.hub_weight(expert, projection)
            side = {"gate": 0, "up": 1}.get(projection) if layout.gated else None
            for part, tensor in (down if projection == "down" else first).items():
                size = half if part == "scales" else layout.intermediate
                rows = slice(None) if side is None else slice(side * size, (side + 1) * size)
                yield part_name(weight, form, part), tensor[expert] if part == "global_scale" else tensor[expert, rows]


def part_name(weight: str, form: Format, part: str) -> str:
    """Checkpoint name of one part of the weight called ``weight``: only its last dotted part changes."""
    return f"{weight.rpartition('.')[0]}.{form.suffixes[part]}"


def module_tensors(module: QuantizedStorage) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint name and tensor of one swapped module's weights: views of the storage of a module that holds codes.

    Biases come with the rest.
    """
    if isinstance(module, SwapqExperts):
        yield from _expert_tensors(module)
    elif isinstance(module, SwapqLinear):
        form = formats.get(module.spec.weights)
        for part, tensor in module.stored_parts("weight").items():
            yield part_name(module.hub_name, form, part), tensor


def checkpoint_tensors(
    model: nn.Module, *, check: bool = True, stacked: Container[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """``(checkpoint name, tensor)`` of every tensor of ``model``, layer by layer in natural order.

    Quantized weights come as codes and scales, per expert; everything else as it is, under the name it has on the Hub. Sharded
    parameters are gathered, so every rank must exhaust this.

    Args:
        check: refuse masters that are not finite.
        stacked: hub prefixes (``model.layers.3.mlp.experts``) of experts to give as stacks (``stacks.py``) instead of one by one.

    Raises:
        FormatError: a master that is not finite, by name.
        UnsupportedError: a family without per-expert tensors, or PEFT adapters.
    """
    root = base_model(model)
    modules = list(root.named_modules())
    _refuse_adapters(modules)
    swapped = _swapped(modules)
    masters = list(_masters(swapped)) if check else []
    finite = _finite(masters)  # devices compute it while the list is made
    units: list[Unit] = []
    for prefix, module in swapped:
        as_stacks = isinstance(module, SwapqExperts) and module.swapq_layout.hub_prefix in stacked
        units.append((prefix, partial(stacked_tensors if as_stacks else module_tensors, module)))  # type: ignore[arg-type]
    units += _rest_units(root, swapped)
    units.sort(key=lambda unit: _place(unit[0]))
    _require_finite(masters, finite)
    for _, produce in units:
        with torch.no_grad():
            yield from produce()


def saved_state(model: nn.Module) -> dict[str, Tensor]:
    """State dict for ``save_pretrained`` of a model that holds codes: quantized tensors under checkpoint names, the rest as it is live."""
    root = base_model(model)
    quantized = {name: t.clone() for _, module in _swapped(root.named_modules()) for name, t in module_tensors(module)}
    return quantized | {name: whole(t) for name, t in _plain_state(root).items()}


def is_peft(module: nn.Module) -> bool:
    """Whether a module is one that PEFT put into the model."""
    return type(module).__module__.partition(".")[0] == "peft"


def _refuse_adapters(modules: list[tuple[str, nn.Module]]) -> None:
    """Refuse PEFT's layers inside the model, which stand under other names and would be written as they are."""
    for name, module in modules:
        if is_peft(module):
            raise UnsupportedError(
                f"{name} is PEFT's {type(module).__name__}: a checkpoint of the base would leave the adapter out; merge and unload first"
            )


def rest_names(root: nn.Module) -> set[str]:
    """Checkpoint names of what no swapped module holds; from names and shapes alone."""
    return set(_hub_names(root, _named_rest(root)))


def _swapped(modules: Iterable[tuple[str, nn.Module]]) -> Swapped:
    return [(name, module) for name, module in modules if isinstance(module, QuantizedStorage)]


def _masters(swapped: Swapped) -> Iterator[tuple[str, Tensor]]:
    """Live name and parameter of every master that will be quantized."""
    for prefix, module in swapped:
        for weight in module.weight_names():
            master = module._parameters.get(weight)
            if master is not None:
                yield f"{prefix}.{weight}", master


@lru_cache(maxsize=1 << 16)
def _place(name: str) -> list[str | int]:
    return dot_natural_key(name)


def _finite(masters: list[tuple[str, Tensor]]) -> list[Tensor]:
    """Flags of all masters. A sharded one is gathered and gone before the next, the others share what looks at them."""
    flags = finite_flags(master.detach() for _, master in masters if not isinstance(master, DTensor))
    return flags + [is_finite(whole(master.detach())) for _, master in masters if isinstance(master, DTensor)]


def _require_finite(masters: list[tuple[str, Tensor]], finite: list[Tensor]) -> None:
    """Refuse the first master that is not finite. Each device is waited for once, however many masters there are."""
    devices: dict[torch.device, list[Tensor]] = {}
    for flag in finite:
        devices.setdefault(flag.device, []).append(flag)
    if all(bool(torch.stack(flags).all()) for flags in devices.values()):
        return
    for name, master in masters:
        require_finite(whole(master.detach()), name)


def _plain_state(root: nn.Module, swapped: Swapped | None = None) -> dict[str, Tensor]:
    """What no swapped module holds, under live names."""
    taken = {
        f"{prefix}.{name}"
        for prefix, module in (_swapped(root.named_modules()) if swapped is None else swapped)
        for weight in module.weight_names()
        for name in (weight, *part_names(weight).values())
    }
    return {name: t for name, t in root.state_dict().items() if name not in taken}


def _named_rest(root: nn.Module, swapped: Swapped | None = None) -> dict[str, Tensor]:
    """What a checkpoint holds beside the swapped modules' weights, under live names: without tied copies."""
    tied = getattr(root, "all_tied_weights_keys", None) or {}
    ignored = getattr(root, "_keys_to_ignore_on_save", None) or ()
    return {name: t for name, t in _plain_state(root, swapped).items() if name not in tied and name not in ignored}


def _rest_units(root: nn.Module, swapped: Swapped | None = None) -> list[Unit]:
    """What no swapped module holds, one by one under Hub names, without tied copies."""
    state = _named_rest(root, swapped)
    if not any(isinstance(t, DTensor) for t in state.values()):
        return [(name, partial(iter, [(name, t.detach())])) for name, t in _under_hub_names(root, state).items()]
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        layer = re.match(r".*?\.\d+\.", name)
        layers.setdefault(layer[0] if layer else name, {})[name] = tensor
    names = [_hub_names(root, layer) for layer in layers.values()]
    if {name for each in names for name in each} != set(_hub_names(root, state)):  # a tensor of several layers
        layers, names = {"": state}, [_hub_names(root, state)]
    groups = [_Layer(root, layer) for layer in layers.values()]
    return [(name, partial(group.give, name)) for group, each in zip(groups, names, strict=True) for name in each]


class _Layer:
    """Sharded tensors of one layer: gathered when the first is asked for, so that no two layers are held at once."""

    def __init__(self, root: nn.Module, state: dict[str, Tensor]) -> None:
        self.root, self.state = root, state
        self.gathered: dict[str, Tensor] | None = None

    def give(self, name: str) -> Iterator[tuple[str, Tensor]]:
        if self.gathered is None:
            self.gathered = _under_hub_names(self.root, {live: whole(t) for live, t in self.state.items()})
        yield name, self.gathered.pop(name).detach()


def _under_hub_names(root: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """``state`` under the names that it has on the Hub. Where these are other names for the same tensors they are found once, since
    transformers builds all its rules anew whenever it is asked."""
    if not isinstance(root, PreTrainedModel):
        return state
    live_names = tuple(state)
    known = _renamed.get(root)
    if known is not None and known[0] == live_names:
        return {hub: state[live] for hub, live in known[1].items()}
    found = as_saved(root, state)
    live = {tensor.dtype for tensor in state.values()}
    if other := [f"{name} ({tensor.dtype})" for name, tensor in found.items() if tensor.dtype not in live]:
        raise UnsupportedError(
            f"{other[0]}: {type(root).__name__} saves {len(other)} tensors in a dtype that no live tensor has, so with "
            "other values; load the model unquantized"
        )
    names = {id(tensor): live for live, tensor in state.items()}
    if len(names) == len(state) and all(id(tensor) in names for tensor in found.values()):
        _renamed[root] = live_names, {hub: names[id(tensor)] for hub, tensor in found.items()}
    return found


def _hub_names(root: nn.Module, state: dict[str, Tensor]) -> list[str]:
    """The names that ``state`` has on the Hub; from names and shapes alone."""
    return list(
        _under_hub_names(root, {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in state.items()})
    )


def quantized_names(model: nn.Module) -> dict[str, list[str]]:
    """Format -> exact checkpoint names of the weights held in it, in natural order."""
    names: dict[str, list[str]] = {}
    for module in swapped_modules(base_model(model)):
        names.setdefault(module.spec.weights, []).extend(module.hub_weights())
    return {fmt: sorted(found, key=dot_natural_key) for fmt, found in sorted(names.items())}


def quantization_config(model: nn.Module) -> dict[str, Any]:
    """``config.json: quantization_config`` of a converted model: the recipe and the exact list of quantized weights."""
    return describe(plan_of(model), quantized_names(model))


def named_tensors(source: "nn.Module | str | os.PathLike[str]") -> Iterator[tuple[str, Tensor]]:
    """Checkpoint name and tensor of a model, converted or not, or of a checkpoint folder."""
    if isinstance(source, nn.Module):
        if is_converted(source):
            yield from checkpoint_tensors(source)
        else:
            for _, produce in _rest_units(base_model(source)):
                yield from produce()
        return
    folder = read_folder(source)
    for shard in folder.files:
        with safe_open(folder.path / shard, framework="pt") as file:
            for name in sorted(file.keys(), key=dot_natural_key):
                yield name, file.get_tensor(name)
