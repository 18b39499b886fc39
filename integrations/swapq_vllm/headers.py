"""Names, dtypes and shapes of an engine's checkpoint, and whether they are what its quantization list promises."""

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from swapq import formats
from swapq.errors import CheckpointError, UnsupportedError
from swapq.headers import read_folder, read_shard

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig

__all__ = ["Meta", "check_downloaded", "check_headers", "checkpoint_files", "engine_headers", "read_headers"]

_logger = logging.getLogger("swapq_vllm")


class Meta(NamedTuple):
    """Dtype and shape of a checkpoint tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def read_headers(directory: str) -> dict[str, Meta]:
    """Dtype and shape of every tensor of a local checkpoint.

    Raises:
        CheckpointError: the folder is damaged, incomplete or inconsistent.
    """
    return {name: Meta(t.dtype, t.shape) for name, t in read_folder(directory).tensors.items()}


def checkpoint_files(model_config: "ModelConfig", load_config: "LoadConfig") -> list[str]:
    """The safetensors files that vLLM reads for a model that is not a local folder.

    Raises:
        UnsupportedError: the engine was started from something other than safetensors files.
    """
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(load_config)
    if not hasattr(loader, "_prepare_weights"):
        raise UnsupportedError(
            f"load format {load_config.load_format!r} does not say which files it read; start the engine from safetensors"
        )
    return loader._prepare_weights(model_config.model, None, model_config.revision, False, ["*.safetensors"])[1]


def engine_headers(model_config: "ModelConfig", load_config: "LoadConfig") -> dict[str, Meta]:
    """Headers of the checkpoint that an engine was started from, wherever vLLM keeps it."""
    if os.path.isdir(model_config.model):
        return read_headers(model_config.model)
    from pathlib import Path

    files = checkpoint_files(model_config, load_config)
    return {name: Meta(t.dtype, t.shape) for file in files for name, t in read_shard(Path(file)).items()}


def check_downloaded(model: str, revision: str | None, listed: Mapping[str, str]) -> None:
    """:func:`check_headers` of a Hub checkpoint in the local cache. One that lies elsewhere is left to the loaders' own checks."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(model, revision=revision, local_files_only=True)
    except LocalEntryNotFoundError:
        _logger.warning(
            "%s is not in the Hugging Face cache: names beside those in its quantization list were not looked for",
            model,
        )
        return
    check_headers(read_headers(folder), listed)


_UNUSUAL = tuple(
    getattr(torch, name)
    for name in (
        "uint8",
        "int8",
        "uint16",
        "uint32",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    )
    if hasattr(torch, name)
)


def check_headers(headers: Mapping[str, Meta], listed: Mapping[str, str]) -> None:
    """Compare headers with the exact list of quantized weights: nothing missing, nothing more, dtypes and shapes of the format.

    vLLM ignores some unexpected names without a word, and does not count what a quantized checkpoint lacks.

    Args:
        headers: name to dtype and shape of every tensor.
        listed: weight name to format.

    Raises:
        CheckpointError: naming up to eight of the tensors that are wrong.
    """
    problems: list[str] = []
    explained: set[str] = set()
    for weight, fmt in listed.items():
        form = formats.get(fmt)
        names = {part: weight.removesuffix("weight") + suffix for part, suffix in form.suffixes.items()}
        explained.update(names.values())
        problems += [f"{names[part]} is missing" for part in names if names[part] not in headers]
        codes = headers.get(weight)
        if codes is None:
            continue
        logical = form.logical_shape(torch.empty(codes.shape, dtype=codes.dtype, device="meta"))
        if len(logical) != 2 or (logical[-1] % form.block and not form.partial_blocks):
            problems.append(f"{weight} has shape {list(codes.shape)}, no {fmt} matrix with blocks of {form.block}")
            continue
        shapes = form.part_shapes(logical, scope=form.default_scope)
        for part, name in names.items():
            meta = headers.get(name)
            if meta is not None and meta != (form.dtypes[part], shapes[part]):
                want = f"{form.dtypes[part]} {list(shapes[part])}"
                problems.append(f"{name} is {meta.dtype} {list(meta.shape)}, {fmt} has {want} there")
    for name, meta in headers.items():
        if name not in explained and (meta.dtype in _UNUSUAL or "_scale" in name.rpartition(".")[2]):
            problems.append(f"{name} ({meta.dtype}) belongs to no weight that quantization_config lists")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            f"the checkpoint and its quantization_config disagree: {'; '.join(problems[:8])}{more}; export or download it again"
        )
