"""``swapq inspect``: what lies in a checkpoint folder, of any family and any quantization, from its headers alone."""

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from swapq import anatomy
from swapq.checkpoint.described import describe_folder
from swapq.checkpoint.record import SCRATCH_NAME, read_record
from swapq.errors import SwapqError
from swapq.headers import Folder, folder_path, read_folder, read_json, shown

__all__ = ["Inspection", "inspect"]


@dataclass
class Inspection:
    """What was found.

    Attributes:
        family: ``model_type``, or None.
        quantization: ``quant_method`` of the config, ``none``, or what speaks against it.
        layout: ``swapq``, ``modelopt``, ``compressed-tensors``, ``none``, or ``unknown``.
        files: safetensors file -> bytes.
        dtypes: stored dtype -> tensors, elements and bytes.
        roles: role -> tensors and bytes; empty where the family is not known.
        notes: what a reader should know.
        nbytes: of all tensors.
        tensors: their number.
    """

    family: str | None = None
    quantization: str = "none"
    layout: str = "unknown"
    files: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, dict[str, int]] = field(default_factory=dict)
    roles: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    nbytes: int = 0
    tensors: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "family": self.family,
            "quantization": self.quantization,
            "layout": self.layout,
            "bytes": self.nbytes,
            "tensors": self.tensors,
            "files": self.files,
            "dtypes": self.dtypes,
            "roles": self.roles,
            "notes": self.notes,
        }


def inspect(directory: "str | os.PathLike[str]") -> Inspection:
    """Look at a folder of safetensors.

    Raises:
        CheckpointError: no folder, no safetensors, a damaged file, an unsafe index, or a config that is no JSON object.
    """
    path = folder_path(directory)
    folder = read_folder(path)
    config: Mapping[str, Any] = read_json(path / "config.json") if (path / "config.json").exists() else {}
    found = Inspection(nbytes=folder.nbytes, tensors=len(folder.tensors))
    if not config:
        found.notes.append("no config.json: no loader takes this folder for a model")
    kind = config.get("model_type")
    found.family = kind if isinstance(kind, str) else None
    found.files = {name: (path / name).stat().st_size for name in folder.files}
    _dtypes(folder, found)
    _layout(folder, config, found)
    _roles(folder, found)
    if (path / SCRATCH_NAME).exists():
        found.notes.append("an unfinished conversion or export left its scratch folder")
    strays = sorted({p.name for p in path.glob("*.safetensors")} - set(folder.files))
    if strays:
        found.notes.append(
            f"{', '.join(map(shown, strays))}: no part of the checkpoint, though some readers load every file"
        )
    record = read_record(path)
    if record is not None:
        found.notes.append(
            f"converted by swapq {record.get('swapq')}, layout {record.get('layout')}; `swapq verify` checks the hashes"
        )
    return found


def _dtypes(folder: Folder, found: Inspection) -> None:
    for header in folder.tensors.values():
        row = found.dtypes.setdefault(
            str(header.dtype).removeprefix("torch."), {"tensors": 0, "elements": 0, "bytes": 0}
        )
        row["tensors"] += 1
        row["elements"] += math.prod(header.shape)
        row["bytes"] += header.nbytes


def _layout(folder: Folder, config: Mapping[str, Any], found: Inspection) -> None:
    entry = config.get("quantization_config")
    found.quantization = str(entry.get("quant_method", "undeclared")) if isinstance(entry, dict) else "none"
    low = [
        t.name
        for t in folder.tensors.values()
        if t.dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
    ]
    if found.quantization == "none":
        found.layout = "none"
        if low:
            found.notes.append(
                f"{low[0]} and {len(low) - 1} more tensors are stored quantized, and the config does not say so"
            )
        return
    stored = low or any(name.endswith((".weight_packed", ".qweight")) for name in folder.tensors)
    none = "the config speaks of quantized weights, and none is stored"
    try:
        described = describe_folder(folder)
    except SwapqError as error:
        found.notes += [str(error)] if stored else [none, str(error)]
        return
    found.layout = described.layout
    if not stored and (described.quantized or described.layout != "swapq"):  # ours lists its weights, perhaps none
        found.notes.append(none)
    counts = Counter(described.quantized.values())
    held = ", ".join(f"{count} {fmt}" for fmt, count in sorted(counts.items()))
    found.notes.append(f"{len(described.quantized)} quantized weights" + (f": {held}" if held else ""))


def _roles(folder: Folder, found: Inspection) -> None:
    try:
        made = anatomy.of_folder(folder)
    except SwapqError as error:
        found.notes.append(f"roles are not known: {error}")
        return
    for info in made.tensors:
        row = found.roles.setdefault(info.role.value, {"tensors": 0, "bytes": 0})
        row["tensors"] += 1
        row["bytes"] += math.prod(info.shape) * info.dtype.itemsize
