"""Fill swapped modules from checkpoint files: exact names, exact dtypes, exact shapes, or an error that names the tensor.

transformers loads everything else. It never sees the quantized tensors, whose dtypes its loader would cast.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from rich.progress import track
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from swapq.checkpoint.tensors import module_tensors, rest_names
from swapq.convert import swapped_modules
from swapq.errors import CheckpointError, UnsupportedError
from swapq.headers import TensorHeader, read_shard
from swapq.hf.foreign import read_names, stored_names, translated
from swapq.nn.linear import SwapqLinear
from swapq.nn.storage import QuantizedStorage

__all__ = ["fill", "headers_of"]


def headers_of(files: Sequence[str]) -> dict[str, tuple[str, TensorHeader]]:
    """Tensor name -> (file, header) over safetensors files.

    Raises:
        CheckpointError: a file that is no safetensors file or is damaged, or a name in two files.
    """
    found: dict[str, tuple[str, TensorHeader]] = {}
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise CheckpointError(f"{file}: quantized checkpoints are safetensors files; pickles are never read")
        for name, header in read_shard(Path(file)).items():
            if name in found:
                raise CheckpointError(
                    f"{name}: stored in {Path(found[name][0]).name} and in {Path(file).name}; a checkpoint holds each name once"
                )
            found[name] = (str(file), header)
    return found


def fill(model: PreTrainedModel, headers: Mapping[str, tuple[str, TensorHeader]], layout: str = "swapq") -> None:
    """Copy codes and scales into the modules that ``allocate`` prepared, from a folder of any layout.

    Raises:
        CheckpointError: a missing tensor, one too many, another dtype or shape, a scale that no quantizer writes, or gate and up scales
            that differ.
        UnsupportedError: a module that ``device_map`` has put on disk.
    """
    modules = list(swapped_modules(model))
    weights = [(module, weight) for module in modules for weight in module.hub_weights()]
    missing = [
        name
        for module, weight in weights
        for name in read_names(weight, module.spec.weights, layout)
        if _where(name, model, headers) is None
    ]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} quantized tensors that its config lists: {_some(missing)}"
        )
    _check_rest(model, headers, {name for module in modules for name in stored_names(module, layout)})
    _check_devices([(name, dest) for module in modules for name, dest in module_tensors(module)])
    filled: dict[tuple[int, int], str] = {}
    with _reading(model, headers) as read:
        for module in track(modules, description="Loading codes", transient=True, disable=len(weights) < 10_000):
            dests = dict(module_tensors(module))
            for weight in module.hub_weights():
                for name, source in translated(weight, module.spec.weights, layout, read).items():
                    _put(name, _as_stored(source, name, dests[name]), dests[name], filled)
    for module in modules:
        _check_partner(module)


@contextmanager
def _reading(
    model: PreTrainedModel, headers: Mapping[str, tuple[str, TensorHeader]]
) -> Iterator[Callable[[str], Tensor]]:
    """A function from checkpoint names to tensors."""
    with ExitStack() as stack:
        files = sorted({file for file, _ in headers.values()})
        opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}

        def read(name: str) -> Tensor:
            found = _where(name, model, headers)
            if found is None:
                raise CheckpointError(f"{name}: missing; the checkpoint is incomplete")
            return opened[found[0]].get_tensor(found[1].name)

        yield read


def _put(name: str, source: Tensor, dest: Tensor, filled: dict[tuple[int, int], str]) -> None:
    slot = (dest.data_ptr(), dest.numel())
    if slot in filled and not torch.equal(dest.cpu(), source):
        raise _unequal(name, filled[slot])
    filled[slot] = name
    dest.copy_(source)


def _check_partner(module: QuantizedStorage) -> None:
    """Gate and up that are linears of their own hold a scale each, which must be equal."""
    if not isinstance(module, SwapqLinear) or not module.partner:
        return
    ours, theirs = (
        {name: t for name, t in module_tensors(m) if t.dtype == torch.float32} for m in (module, *module.partner)
    )
    for (name, mine), (other, its) in zip(ours.items(), theirs.items(), strict=True):
        if not torch.equal(mine.cpu(), its.cpu()):
            raise _unequal(name, other)


def _unequal(name: str, other: str) -> CheckpointError:
    return CheckpointError(
        f"{name} differs from {other}: gate and up of one expert share one FP32 scale; convert it again from its BF16 source"
    )


def _check_devices(wanted: Sequence[tuple[str, Tensor]]) -> None:
    offloaded = [name for name, dest in wanted if dest.is_meta]
    if offloaded:
        raise UnsupportedError(
            f"{offloaded[0]}: its module is on disk by the device_map, and codes are not offloaded while loading; give it a device, or "
            "load without a device_map and call accelerate's disk_offload"
        )


def _check_rest(model: PreTrainedModel, headers: Mapping[str, object], wanted: set[str]) -> None:
    """What is not quantized must be there too, and no tensor may stand beside the quantized ones unread.

    transformers draws random values for what is missing and overlooks what is left over, with a line in a report at most.
    """
    rest = rest_names(model)
    prefix = f"{model.base_model_prefix}."
    if type(model).__name__ in (model.config.architectures or ()) or model.base_model is model:
        missing = sorted(name for name in rest if name not in headers and prefix + name not in headers)
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks {len(missing)} tensors that stay unquantized: {_some(missing)}; download it again"
            )
    owners = {owner for module in swapped_modules(model) for owner in _owners(module)}
    known = wanted | rest
    extra = sorted(
        name for name in headers if not known & {name, name.removeprefix(prefix)} and _inside(name, owners, prefix)
    )
    if extra:
        raise CheckpointError(
            f"the checkpoint holds {len(extra)} tensors of quantized modules that nothing reads: {_some(extra)}; the file and its config "
            "disagree, convert it again"
        )


def _owners(module: QuantizedStorage) -> set[str]:
    """Names, in a checkpoint, of the modules whose weights this one holds."""
    layout = getattr(module, "swapq_layout", None)
    return {layout.hub_prefix} if layout is not None else {name.rpartition(".")[0] for name in module.hub_weights()}


def _inside(name: str, owners: set[str], prefix: str) -> bool:
    parts = name.split(".")
    above = {".".join(parts[:i]) for i in range(1, len(parts))}
    return bool(owners & (above | {part.removeprefix(prefix) for part in above}))


def _where(
    name: str, model: PreTrainedModel, headers: Mapping[str, tuple[str, TensorHeader]]
) -> tuple[str, TensorHeader] | None:
    """Where a tensor lies; a base model loaded from a checkpoint with a head lacks the head's prefix."""
    return headers.get(name) or headers.get(f"{model.base_model_prefix}.{name}")


def _as_stored(source: Tensor, name: str, dest: Tensor) -> Tensor:
    if source.dtype == torch.float8_e8m0fnu and dest.dtype == torch.uint8:
        source = source.view(torch.uint8)  # the same bytes under their newer name; a copy would convert the number
    if source.dtype != dest.dtype or source.shape != dest.shape:
        raise CheckpointError(
            f"{name}: stored as {source.dtype} {tuple(source.shape)}, expected {dest.dtype} {tuple(dest.shape)}; the file and its "
            "config disagree, convert it again"
        )
    bits = source.view(torch.uint8) if source.element_size() == 1 else None
    scales = name.endswith(".weight_scale")
    if bits is not None and source.dtype == torch.float8_e4m3fn and ((bits & 0x7F) == 0x7F).any():
        raise CheckpointError(f"{name}: holds NaN; the file is damaged or was made from a diverged run")
    if bits is not None and scales and (bits >= (0x80 if source.dtype == torch.float8_e4m3fn else 0xFF)).any():
        raise CheckpointError(
            f"{name}: holds a block scale below zero or NaN, which no quantizer writes; the file is damaged"
        )
    if source.dtype in (torch.float32, torch.bfloat16) and not (torch.isfinite(source) & (source > 0)).all():
        bad = source[~(torch.isfinite(source) & (source > 0))][0].item()
        kind = "FP32" if source.dtype == torch.float32 else "BF16"
        raise CheckpointError(f"{name}: the {kind} scale is {bad}; a scale is finite and above zero")
    return source


def _some(names: Sequence[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
