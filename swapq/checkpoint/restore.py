"""``swapq.load_checkpoint``: the tensors of a saved checkpoint back into a live model, in place and proved.

Transformers saves experts one by one although the model holds them fused, and its Trainer resumes by plain names, so fused experts keep
whatever they had. Here each saved tensor is written to the part of the parameter that ``save_pretrained`` would save under its name.
Invariant: nothing is changed until names, shapes and dtypes fit.
"""

import contextlib
import enum
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from swapq.checkpoint.saved import read_saved
from swapq.checkpoint.tensors import base_model, is_peft
from swapq.convert import swapped_modules
from swapq.errors import CheckpointError, UnsupportedError
from swapq.headers import Folder
from swapq.saving_rules import following

__all__ = ["load_checkpoint"]

#: dtypes that may be widened into another
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def load_checkpoint(model: nn.Module, directory: "str | os.PathLike[str]") -> None:
    """Give every tensor of a model, converted or not, the value that a checkpoint of ``save_pretrained`` or of a Trainer holds.

    Parameters stay the objects they are, so an optimizer goes on with them. Afterwards the checkpoint is read again and compared, bit for
    bit, with what the model would save under the same names.

    Args:
        model: unsharded, with masters; possibly wrapped in DDP or ``torch.compile``.
        directory: ``model.safetensors`` or its shards and their index. Experts may be stored one by one or fused.

    Raises:
        CheckpointError: the folder is damaged; a tensor is missing, unexpected, of another shape, or of a dtype whose values the model's
            would round (all found before anything is changed); reading stopped in the middle; or a tensor does not have the checkpoint's
            value afterwards.
        UnsupportedError: a sharded or offloaded model, one on the device meta, one that holds codes, PEFT adapters or state that is no
            parameter, or a family whose tensors are stored in another order.
    """
    root = base_model(model)
    if any(module.stored for module in swapped_modules(root)):
        raise UnsupportedError(
            "the model holds codes and no masters (`trainable=False`), so no checkpoint can be loaded into it; open the checkpoint with "
            "from_pretrained and convert it"
        )
    _require_writable(root)
    folder = read_saved(directory)
    held = _held(root, folder)
    written: list[str] = []
    try:
        with contextlib.ExitStack() as stack, torch.no_grad():
            files = {file: stack.enter_context(safe_open(folder.path / file, framework="pt")) for file in folder.files}

            def stored(name: str) -> Tensor:
                return files[folder.tensors[name].file].get_tensor(name)

            for name in folder.tensors:
                tensor = stored(name)
                written.append(name)
                held[name].memory.copy_(tensor)
            _require_restored(root, folder, held, stored)
    except CheckpointError:
        raise
    except Exception as error:  # whatever it is, the model is not what it was
        raise CheckpointError(_stopped(folder, written, error)) from error


def _stopped(folder: Folder, written: list[str], error: Exception) -> str:
    """What is said of an error between the first file and the last comparison."""
    said = f"{folder.path}: reading stopped ({type(error).__name__}: {error})"
    if not written:
        return f"{said}; nothing was loaded, the model is as it was"
    if len(written) < len(folder.tensors):
        state = f"the model is half loaded: {len(written)} of {len(folder.tensors)} tensors, the last {written[-1]}"
    else:
        state = "every tensor was written, but they could not all be compared with the checkpoint"
    return f"{said}; {state}. Do not train on: build the model again"


class _Rules(enum.Enum):
    """What gives the model's tensors the names and parts that a checkpoint may have them in."""

    REMEMBERED = "the rules that the model was opened by, which save_pretrained follows"
    OWN = "the rules of the model's class, where it was opened by others: from a folder that holds experts fused, say"
    NONE = "no rules: the model's own names"


class _Held(NamedTuple):
    """The model's memory for a tensor of the checkpoint: all of a parameter, or one expert's part of a fused one."""

    rules: _Rules
    memory: Tensor


def _held(root: nn.Module, folder: Folder) -> dict[str, _Held]:
    """Name in the checkpoint -> the model's memory for it.

    Each parameter follows the first rules by which the checkpoint holds all of it; the rules that know more of the names come first.
    """
    live: dict[str, Tensor] = root.state_dict()
    stored = folder.tensors
    readings: dict[_Rules, dict[str, Tensor]] = {}
    for rules in _known_rules(root):
        # the rules by which a quantized folder was opened have no way back, which transformers says in these words
        with _InPlace(), contextlib.suppress(NotImplementedError, ValueError):
            readings[rules] = _as_saved(root, live, rules)
    order = sorted(
        readings, key=lambda rules: -len(readings[rules].keys() & stored.keys()) / max(len(readings[rules]), 1)
    )
    ignored = set(getattr(root, "_keys_to_ignore_on_save", None) or ())
    parts = {rules: _by_storage(readings[rules]) for rules in order}
    held: dict[str, _Held] = {}
    missing: list[str] = []
    twice: list[str] = []
    for storage, whole in _by_storage(live).items():
        found = {rules: parts[rules].get(storage, {}) for rules in order}
        lacking = {rules: _lacking(tensors, stored, ignored) for rules, tensors in found.items()}
        complete = {rules: _elements(tensors) == _elements(whole) for rules, tensors in found.items()}
        able = [rules for rules in order if complete[rules]] or [_Rules.NONE]
        chosen = next((rules for rules in able if not lacking[rules]), None)
        if chosen is None:
            chosen = max(able, key=lambda rules: len(found[rules].keys() & stored.keys()))
            missing += lacking[chosen]
        for name in found[chosen].keys() & stored.keys():
            if name in held:
                twice.append(name)
            held[name] = _Held(chosen, found[chosen][name])
    unknown = [name for name in stored if name not in held]
    here = set(_by_storage(live))
    copied = [n for n in unknown if any(n in found and _storage(found[n]) not in here for found in readings.values())]
    if copied:
        raise UnsupportedError(
            f"{_some(copied)}: {type(root).__name__} stores its values in another order than it holds them, so they cannot be written in "
            "place; open the checkpoint with from_pretrained"
        )
    _require_fit(folder, held, {"missing": missing, "unexpected": unknown, "the name of two parameters": twice})
    return held


def _require_writable(root: nn.Module) -> None:
    """Refuse a model whose tensors cannot be written in place, before anything is read."""
    adapter = next((f"{n} is PEFT's {type(m).__name__}" for n, m in root.named_modules() if is_peft(m)), None)
    if adapter:
        raise UnsupportedError(
            f"the model carries PEFT adapters ({adapter}); load the checkpoint before they are added"
        )
    live: dict[str, Any] = root.state_dict()
    sharded = [name for name, tensor in live.items() if isinstance(tensor, DTensor)]
    if sharded:
        raise UnsupportedError(f"{sharded[0]} is sharded; load the checkpoint before the model is sharded")
    absent = [name for name, tensor in live.items() if isinstance(tensor, Tensor) and tensor.is_meta]
    if absent:
        offloaded = any(hasattr(module, "_hf_hook") for module in root.modules())
        why = "offloaded by Accelerate" if offloaded else "built without memory (device meta)"
        todo = (
            "load the checkpoint before the model is offloaded"
            if offloaded
            else "build it on a device, or use from_pretrained"
        )
        raise UnsupportedError(f"{_some(absent)}: {why}, so there is nothing to write to; {todo}")
    owned = {_storage(tensor) for tensor in (*root.parameters(), *root.buffers())}
    foreign = [name for name, t in live.items() if not isinstance(t, Tensor) or _storage(t) not in owned]
    if foreign:
        raise UnsupportedError(
            f"{_some(foreign)}: in the model's state and no parameter or buffer of it (get_extra_state, or a hook of state_dict), so it "
            "cannot be written in place; use load_state_dict"
        )
    shared = [name for name, tensor in live.items() if _overlaps(tensor)]
    if shared:
        raise UnsupportedError(
            f"{_some(shared)}: several values share one place in memory (an expanded tensor), so they cannot be written one by one; give "
            "the parameter memory of its own (contiguous)"
        )


def _overlaps(tensor: Tensor) -> bool:
    sizes = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    span = 1 + sum((size - 1) * stride for size, stride in sizes)
    return tensor.numel() > 0 and (span < tensor.numel() or any(stride == 0 for _, stride in sizes))


def _by_storage(tensors: Mapping[str, Tensor]) -> dict[Any, dict[str, Tensor]]:
    """Storage -> name -> tensor."""
    found: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found.setdefault(_storage(tensor), {})[name] = tensor
    return found


def _storage(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _elements(tensors: Mapping[str, Tensor]) -> int:
    """Values in all of them, those of tied ones once."""
    return sum(tensor.numel() for tensor in {_memory(tensor): tensor for tensor in tensors.values()}.values())


def _lacking(tensors: Mapping[str, Tensor], stored: Mapping[str, Any], ignored: set[str]) -> list[str]:
    """Those that the checkpoint does not hold. A tied tensor may be there once or under each of its names."""
    written = {_memory(tensor) for name, tensor in tensors.items() if name in stored}
    return [n for n, t in tensors.items() if n not in stored and n not in ignored and _memory(t) not in written]


class _InPlace(TorchFunctionMode):
    """Inside, transformers' rules for saving give views of the parameters that they split: nothing is made contiguous."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _known_rules(root: nn.Module) -> list[_Rules]:
    if not isinstance(root, PreTrainedModel):
        return [_Rules.NONE]
    opened = getattr(root, "_weight_conversions", None) is not None
    return [_Rules.REMEMBERED, _Rules.OWN, _Rules.NONE] if opened else [_Rules.REMEMBERED, _Rules.NONE]


def _as_saved(root: nn.Module, state: Mapping[str, Tensor], rules: _Rules) -> dict[str, Tensor]:
    """``state`` under the names and in the parts that ``save_pretrained`` writes, or would write by other rules."""
    if rules is _Rules.NONE or not isinstance(root, PreTrainedModel):
        return dict(state)
    if rules is _Rules.REMEMBERED:
        return revert_weight_conversion(root, dict(state))
    with following(root, None):
        return revert_weight_conversion(root, dict(state))


def _require_fit(folder: Folder, held: Mapping[str, _Held], names: Mapping[str, list[str]]) -> None:
    """Refuse a checkpoint that does not hold exactly the model's tensors; ``names``: what is wrong with which."""
    both = [(name, header, held[name].memory) for name, header in folder.tensors.items() if name in held]
    shapes = [f"{n} {list(h.shape)} for {list(t.shape)}" for n, h, t in both if h.shape != tuple(t.shape)]
    dtypes = [f"{n} {h.dtype} for {t.dtype}" for n, h, t in both if not _widens(h.dtype, t.dtype)]
    found = {**names, "of another shape": shapes, "of a dtype that would be rounded": dtypes}
    problems = [f"{what}: {_some(names)}" for what, names in found.items() if names]
    if problems:
        raise CheckpointError(
            f"{folder.path} does not hold this model's tensors, and nothing was loaded. {'; '.join(problems)}. Start from the model and "
            "dtype that the checkpoint was saved from"
        )


def _require_restored(
    root: nn.Module, folder: Folder, held: Mapping[str, _Held], stored: Callable[[str], Tensor]
) -> None:
    """Compare what the model would save now with the checkpoint, layer by layer, since saving may copy."""
    live: dict[str, Tensor] = root.state_dict()
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in live.items():
        layer = re.match(r".*?\.\d+\.", name)
        layers.setdefault(layer[0] if layer else name, {})[name] = tensor
    unproved = dict.fromkeys(folder.tensors)
    for state in (*layers.values(), live):  # all at once only for what no layer has alone
        for rules in dict.fromkeys(held[name].rules for name in unproved):
            saved = _as_saved(root, state, rules)
            for name in saved.keys() & unproved.keys():
                if held[name].rules is rules and _equal(saved[name], stored(name)):
                    del unproved[name]
    if unproved:
        raise CheckpointError(
            f"{folder.path}: after loading, the model does not hold the checkpoint's value of {_some(unproved)}; two names may be one "
            "tied tensor in the model and two in the checkpoint, or the files changed meanwhile. Do not train on: build the model again"
        )


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()


def _widens(stored: torch.dtype, live: torch.dtype) -> bool:
    """Whether every value of one dtype is one of the other."""
    return stored == live or ({stored, live} <= _FLOATS and torch.promote_types(stored, live) == live)


def _equal(held: Tensor, stored: Tensor) -> bool:
    """Whether the bits are the same, NaNs included."""
    expected = stored.to(held.device).to(held.dtype)
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (held.detach(), expected)))


def _some(names: Iterable[str], limit: int = 4) -> str:
    all_names = list(names)
    shown = ", ".join(all_names[:limit])
    return shown if len(all_names) <= limit else f"{shown} and {len(all_names) - limit} more"
