"""``swapq.load_checkpoint``: the tensors of a saved checkpoint back into a live model, in place and proved.

Transformers saves experts one by one although the model holds them fused, and its Trainer resumes by plain names, so fused experts keep
whatever they had. Here each saved tensor is written to the part of the parameter that ``save_pretrained`` would save under its name.
Invariant: nothing is changed until names, shapes and dtypes fit.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from swapq.checkpoint.tensors import base_model
from swapq.convert import swapped_modules
from swapq.errors import CheckpointError, UnsupportedError
from swapq.headers import Folder, TensorHeader, read_folder

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
            would round (all found before anything is changed); or one does not have the checkpoint's value afterwards.
        UnsupportedError: a sharded model, one that holds codes, PEFT adapters, or a family whose tensors are stored in another order.
    """
    root = base_model(model)
    if any(module.stored for module in swapped_modules(root)):
        raise UnsupportedError(
            "the model holds codes and no masters (`trainable=False`), so no checkpoint can be loaded into it; open the checkpoint with "
            "from_pretrained and convert it"
        )
    folder = read_folder(directory)
    held = _held(root, folder.tensors)
    _require_fit(root, folder, held)
    with contextlib.ExitStack() as stack, torch.no_grad():
        files = {file: stack.enter_context(safe_open(folder.path / file, framework="pt")) for file in folder.files}

        def stored(name: str) -> Tensor:
            return files[folder.tensors[name].file].get_tensor(name)

        for name in folder.tensors:
            held[name].copy_(stored(name))
        _require_restored(root, folder, stored)


def _held(root: nn.Module, stored: Mapping[str, TensorHeader]) -> dict[str, Tensor]:
    """Name in the checkpoint -> the model's memory for it: all of a parameter, or one expert's part of a fused one."""
    live: dict[str, Tensor] = root.state_dict()
    sharded = [name for name, tensor in live.items() if isinstance(tensor, DTensor)]
    if sharded:
        raise UnsupportedError(f"{sharded[0]} is sharded; load the checkpoint before the model is sharded")
    with _InPlace():
        saved = _as_saved(root, live)
    if _stored_fused(live, saved, stored):
        return live
    memory = {tensor.untyped_storage().data_ptr() for tensor in live.values()}
    copied = [name for name, tensor in saved.items() if tensor.untyped_storage().data_ptr() not in memory]
    if copied:
        raise UnsupportedError(
            f"{_some(copied)}: {type(root).__name__} stores its values in another order than it holds them, so they cannot be written in "
            "place; open the checkpoint with from_pretrained"
        )
    return saved


class _InPlace(TorchFunctionMode):
    """Inside, transformers' rules for saving give views of the parameters that they split: nothing is made contiguous."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _as_saved(root: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``state`` under the names and in the parts that ``save_pretrained`` writes."""
    return revert_weight_conversion(root, dict(state)) if isinstance(root, PreTrainedModel) else dict(state)


def _stored_fused(live: Mapping[str, Tensor], saved: Mapping[str, Tensor], stored: Mapping[str, Any]) -> bool:
    """Whether the checkpoint has the names of the model itself where these are not those that it would save."""
    return bool((live.keys() - saved.keys()) & stored.keys())


def _require_fit(root: nn.Module, folder: Folder, held: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint that does not hold exactly the model's tensors. A tied tensor may be there once or under each of its names."""
    stored = folder.tensors
    written = {_memory(held[name]) for name in stored if name in held}
    ignored = set(getattr(root, "_keys_to_ignore_on_save", None) or ())
    missing = [n for n, t in held.items() if n not in stored and n not in ignored and _memory(t) not in written]
    unexpected = [name for name in stored if name not in held]
    both = [(name, header, held[name]) for name, header in stored.items() if name in held]
    shapes = [f"{n} {list(h.shape)} for {list(t.shape)}" for n, h, t in both if h.shape != tuple(t.shape)]
    dtypes = [f"{n} {h.dtype} for {t.dtype}" for n, h, t in both if not _widens(h.dtype, t.dtype)]
    found = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": shapes,
        "of a dtype that would be rounded": dtypes,
    }
    problems = [f"{what}: {_some(names)}" for what, names in found.items() if names]
    if problems:
        raise CheckpointError(
            f"{folder.path} does not hold this model's tensors, and nothing was loaded. {'; '.join(problems)}. Start from the model and "
            "dtype that the checkpoint was saved from"
        )


def _require_restored(root: nn.Module, folder: Folder, stored: Callable[[str], Tensor]) -> None:
    """Compare what the model would save now with the checkpoint, layer by layer, since saving may copy."""
    live: dict[str, Tensor] = root.state_dict()
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in live.items():
        layer = re.match(r".*?\.\d+\.", name)
        layers.setdefault(layer[0] if layer else name, {})[name] = tensor
    unproved = dict.fromkeys(folder.tensors)
    for state in (*layers.values(), live):  # all at once only for what no layer has alone
        if not unproved:
            break
        saved = _as_saved(root, state)
        if _stored_fused(state, saved, folder.tensors):
            saved = state
        for name in saved.keys() & unproved.keys():
            if _equal(saved[name], stored(name)):
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
