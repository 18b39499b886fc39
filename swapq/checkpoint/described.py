"""What a quantized folder says of itself: layout, recipe and the exact list of quantized weights, whoever wrote it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swapq.checkpoint.layouts.base import stem
from swapq.checkpoint.record import read_record
from swapq.errors import CheckpointError, UnsupportedError
from swapq.headers import Folder, read_json
from swapq.natural import natural_key
from swapq.recipe import Recipe

__all__ = ["Described", "algorithm_format", "compressed_format", "describe_folder"]

_ALGORITHMS = {"NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4", "MXFP8": "mxfp8"}
_CT_FORMATS = {"nvfp4-pack-quantized": "nvfp4", "mxfp8-quantized": "mxfp8"}


@dataclass(frozen=True)
class Described:
    """A folder's own description.

    Attributes:
        layout: ``swapq``, ``modelopt``, ``compressed-tensors``, or ``none`` for a folder that claims no quantization.
        quantized: weight -> format. From the list of layout ``swapq``; for the others, what the config covers and the headers hold.
        recipe: of layout ``swapq`` or of the completion record, else None.
        config: ``config.json``.
    """

    layout: str
    quantized: Mapping[str, str]
    recipe: Recipe | None
    config: Mapping[str, Any]


def describe_folder(folder: Folder) -> Described:
    """Read the config, and the completion record if there is one.

    Raises:
        CheckpointError: no config, a config that contradicts itself, or one of a method that is not known.
        RecipeError: a recipe that is not one.
    """
    config = read_json(folder.path / "config.json")
    described = config.get("quantization_config") or {}
    if not isinstance(described, dict):
        raise CheckpointError(f"config.json: quantization_config is {type(described).__name__}, expected an object")
    record = read_record(folder.path)
    recipe = Recipe.from_dict(record["recipe"]) if record and isinstance(record.get("recipe"), dict) else None
    method = str(described.get("quant_method") or "")
    if not method:
        return Described("none", {}, recipe, config)
    if method == "swapq":
        return Described("swapq", _listed(described), Recipe.from_dict(described.get("recipe") or {}), config)
    if method == "modelopt":
        return Described("modelopt", _modelopt(described, folder), recipe, config)
    if method == "compressed-tensors":
        return Described("compressed-tensors", _compressed(described, folder), recipe, config)
    raise UnsupportedError(
        f"config.json: quant_method is {method!r}; swapq reads swapq, modelopt and compressed-tensors"
    )


def _listed(described: Mapping[str, Any]) -> dict[str, str]:
    groups = described.get("quantized")
    if not isinstance(groups, dict) or not all(isinstance(v, list) for v in groups.values()):
        raise CheckpointError(
            "config.json: quantization_config has no `quantized`, the list of quantized weights by format"
        )
    found: dict[str, str] = {}
    for fmt, names in groups.items():
        for name in names:
            if name in found:
                raise CheckpointError(f"config.json: {name} is listed as {found[name]} and as {fmt}")
            found[name] = fmt
    return found


def _modelopt(described: Mapping[str, Any], folder: Folder) -> dict[str, str]:
    layers = described.get("quantized_layers")
    if isinstance(layers, dict) and layers:
        return {f"{name}.weight": algorithm_format(entry.get("quant_algo")) for name, entry in layers.items()}
    fmt = algorithm_format(described.get("quant_algo"))
    return _by_suffix(folder, ".weight_scale", ".weight", fmt)


def _compressed(described: Mapping[str, Any], folder: Folder) -> dict[str, str]:
    return _by_suffix(folder, ".weight_scale", ".weight", compressed_format(described))


def compressed_format(described: Mapping[str, Any]) -> str:
    """Format of a compressed-tensors ``quantization_config``.

    Raises:
        UnsupportedError: one that swapq does not read.
    """
    kind = described.get("format")
    if kind not in _CT_FORMATS:
        raise UnsupportedError(
            f"config.json: compressed-tensors format is {kind!r}; swapq reads {', '.join(_CT_FORMATS)}"
        )
    return _CT_FORMATS[str(kind)]


def algorithm_format(name: object) -> str:
    """Format of a ModelOpt ``quant_algo``.

    Raises:
        UnsupportedError: one that swapq does not read.
    """
    fmt = _ALGORITHMS.get(str(name).upper())
    if fmt is None:
        raise UnsupportedError(f"config.json: quant_algo is {name!r}; swapq reads {', '.join(_ALGORITHMS)}")
    return fmt


def _by_suffix(folder: Folder, marker: str, weight: str, fmt: str) -> dict[str, str]:
    found = sorted((n for n in folder.tensors if n.endswith(marker)), key=natural_key)
    return {stem(name) + weight: fmt for name in found}


def folder_path(directory: "str | os.PathLike[str]") -> Path:
    """The folder as a path.

    Raises:
        CheckpointError: it is not a folder.
    """
    path = Path(directory)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    return path
