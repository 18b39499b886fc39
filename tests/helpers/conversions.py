"""Tiny checkpoints, their conversion, and what the folders hold."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import swapq
from swapq.checkpoint import conversion
from tests.helpers.models import FAMILIES

__all__ = ["convert", "every", "file_hashes", "rewrite", "same", "saved"]


def saved(folder: Path, family: str = "qwen3_moe", dtype: torch.dtype = torch.bfloat16, size: str = "5GB") -> Path:
    FAMILIES[family]().to(dtype).save_pretrained(folder, max_shard_size=size)
    return folder


def convert(src: Path, dst: Path, recipe: object = "nvfp4-rl", **options: object) -> conversion.Conversion:
    return swapq.convert_checkpoint(src, dst, recipe, progress=False, **options)  # type: ignore[arg-type]


def every(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    def raw(t: Tensor) -> Tensor:
        return t.reshape(-1).view(torch.uint8) if t.numel() else t

    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and torch.equal(raw(a[k]), raw(b[k])) for k in a
    )


def file_hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.safetensors")}


def rewrite(folder: Path, shards: list[dict[str, Tensor]]) -> None:
    """Store tensors in shards of the caller's choosing."""
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    weight_map = {k: n for n, s in zip(names, shards, strict=True) for k in s}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
