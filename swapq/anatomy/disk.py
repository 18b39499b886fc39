"""Anatomy of a checkpoint folder, from ``config.json`` and safetensors headers alone."""

import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from swapq.anatomy.assemble import Raw, assemble
from swapq.anatomy.config import text_config
from swapq.anatomy.family import FAMILIES
from swapq.anatomy.role import UNTOUCHED
from swapq.anatomy.tensor import Anatomy, Quantization
from swapq.errors import AnatomyError
from swapq.headers import Folder, read_folder, read_json

__all__ = ["of_checkpoint", "of_folder"]

_CODES = (torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)


def of_checkpoint(directory: str | os.PathLike[str]) -> Anatomy:
    """Anatomy of a Hugging Face checkpoint folder; no tensor byte is read.

    A quantized checkpoint is reported in ``quantization``, not refused: what to do about it is the caller's business.

    Raises:
        CheckpointError: the folder is damaged, incomplete or unsafe.
        AnatomyError: an unknown family with experts, a layer, expert or FP8 scale that is missing, or shapes that disagree with the
            config.
    """
    return of_folder(read_folder(directory))


def of_folder(folder: Folder) -> Anatomy:
    """:func:`of_checkpoint` of headers that were read already."""
    config = read_json(folder.path / "config.json")
    raws = [Raw(t.name, t.shape, t.dtype) for t in folder.tensors.values()]
    quantization = _quantization(folder, config)
    anatomy = assemble(
        raws,
        config,
        source="checkpoint",
        where=str(folder.path),
        module_list="auto_map" in config,
        quantization=quantization,
    )
    _check_layers(anatomy, config)
    if quantization is not None and quantization.is_block_fp8 and quantization.stored:
        _check_scales(folder, quantization)
    return anatomy


def _check_layers(anatomy: Anatomy, config: Mapping[str, Any]) -> None:
    text = text_config(config)
    seen = {t.layer for t in anatomy.tensors if t.note not in UNTOUCHED}
    absent = list(islice((f"layers.{i}" for i in range(anatomy.num_layers) if i not in seen), 4))
    if absent:
        raise AnatomyError(
            f"config.json says {anatomy.num_layers} layers; no tensor of {', '.join(absent)} is in the files"
        )
    family = FAMILIES.get(anatomy.family)
    quantization = anatomy.quantization
    if family is None or (not anatomy.experts and quantization is not None and quantization.stored):
        return
    held = {layout.layer for layout in anatomy.experts}
    without = [i for i in range(anatomy.num_layers) if i not in held and family.is_moe(text, i)]
    if without:
        where = f"layers.{without[0]}.{family.block[1]}.experts"
        raise AnatomyError(
            f"config.json says that {len(without)} more layer(s) have routed experts; {where} is not in the files"
        )


def _quantization(folder: Folder, config: Mapping[str, Any]) -> Quantization | None:
    low = next((t for t in folder.tensors.values() if len(t.shape) >= 2 and t.dtype in _CODES), None)
    where, entry = _entry(folder, config)
    if entry is None:
        return None if low is None else Quantization("undeclared", f"{folder.path}: {low.name} ({low.dtype})")
    method = str(entry.get("quant_method", entry.get("quant_algo", "")))
    size = entry.get("weight_block_size")
    block = None
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        block = (size[0], size[1])
    return Quantization(method, f"{folder.path / where}", entry, low is not None, block)


def _entry(folder: Folder, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | None]:
    for where, holder in (("config.json", config), ("config.json text_config", text_config(config))):
        for key in ("quantization_config", "compression_config"):
            if entry := holder.get(key):
                if not isinstance(entry, Mapping):
                    raise AnatomyError(f"{where}: {key} is {entry!r}, expected an object")
                return f"{where}: {key}", entry
    path: Path = folder.path / "hf_quant_config.json"
    if path.is_file():
        inner = read_json(path).get("quantization")
        entry = dict(inner) if isinstance(inner, Mapping) else {}
        return path.name, {"quant_method": "modelopt", **entry}
    return "", None


def _check_scales(folder: Folder, quantization: Quantization) -> None:
    block = quantization.block or (128, 128)
    for tensor in folder.tensors.values():
        if tensor.dtype != torch.float8_e4m3fn or len(tensor.shape) < 2:
            continue
        name = f"{tensor.name}_scale_inv"
        scale = folder.tensors.get(name)
        if scale is None:
            raise AnatomyError(f"{tensor.name} is FP8 and its scale {name} is missing; download the model again")
        *stack, rows, columns = tensor.shape
        expected = (*stack, -(-rows // block[0]), -(-columns // block[1]))
        if scale.shape != expected:
            raise AnatomyError(
                f"{name} is {list(scale.shape)}, expected {list(expected)} for {list(tensor.shape)} in blocks of {list(block)}"
            )
