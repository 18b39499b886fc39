"""What the tests of public faults share."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import swapq
from tests.helpers.models import prompts, qwen3_moe

RECIPES = ("nvfp4-rl", "mxfp8-rl")
MODES = [
    ("nvfp4-rl", "dequantized"),
    ("nvfp4-rl", "high_precision"),
    ("mxfp8-rl", "low_precision"),
    ("mxfp8-rl", "high_precision"),
    ("mxfp8-rl", "dequantized"),
]
EXPERT = "model.layers.0.mlp.experts.3"


def converted(recipe: str = "nvfp4-rl", model: PreTrainedModel | None = None, **options: object) -> PreTrainedModel:
    return swapq.convert(qwen3_moe() if model is None else model, recipe, **({"last_layers_bf16": 0} | options))


def exported(folder: Path, recipe: str = "nvfp4-rl", **options: object) -> Path:
    swapq.export(converted(recipe), folder, **options)
    return folder


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def edit_config(folder: Path, change: Callable[[dict], object]) -> Path:
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def load(folder: Path, **options: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(prompts()).logits


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(prompts(), labels=prompts()).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bytes: NaN and the sign of zero count."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and swapq.digest(a) == swapq.digest(b)
