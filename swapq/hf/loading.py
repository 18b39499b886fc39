"""Fill swapped modules from checkpoint files: exact names, exact dtypes, exact shapes, or an error that names the tensor.

transformers loads everything else. It never sees the quantized tensors, whose dtypes its loader would cast.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.progress import track
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from swapq.checkpoint.tensors import module_tensors
from swapq.convert import swapped_modules
from swapq.errors import CheckpointError
from swapq.headers import TensorHeader, read_shard

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


def fill(model: PreTrainedModel, headers: Mapping[str, tuple[str, TensorHeader]]) -> None:
    """Copy codes and scales into the modules that ``allocate`` prepared.

    Raises:
        CheckpointError: a missing tensor, another dtype or shape, a scale that is not finite, or gate and up scales that differ.
    """
    modules: list[nn.Module] = list(swapped_modules(model))
    wanted = [(name, dest) for module in modules for name, dest in module_tensors(module)]  # type: ignore[arg-type]
    missing = [name for name, _ in wanted if _where(name, model, headers) is None]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} quantized tensors that its config lists: {_some(missing)}"
        )
    filled: dict[tuple[int, int], str] = {}
    with ExitStack() as stack:
        opened = {
            file: stack.enter_context(safe_open(file, framework="pt"))
            for file in sorted({f for f, _ in headers.values()})
        }
        for name, dest in track(wanted, description="Loading codes", transient=True, disable=len(wanted) < 20_000):
            found = _where(name, model, headers)
            if found is None:
                raise CheckpointError(f"{name}: missing")
            file, header = found
            source = _as_stored(opened[file].get_tensor(header.name), name, dest)
            slot = (dest.data_ptr(), dest.numel())
            if slot in filled and not torch.equal(dest.cpu(), source):
                raise CheckpointError(
                    f"{name} differs from {filled[slot]}: gate and up of one expert share one FP32 scale; convert it again"
                )
            filled[slot] = name
            dest.copy_(source)


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
    if source.dtype == torch.float8_e4m3fn and not torch.isfinite(source.float()).all():
        raise CheckpointError(f"{name}: holds NaN; the file is damaged or was made from a diverged run")
    if source.dtype == torch.float32 and not (torch.isfinite(source) & (source > 0)).all():
        raise CheckpointError(
            f"{name}: the FP32 scale is {source.flatten()[0].item()}; a scale is finite and above zero"
        )
    return source


def _some(names: Sequence[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
