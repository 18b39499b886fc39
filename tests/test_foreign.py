"""Quantized folders of other tools' layouts, opened by from_pretrained into modules that hold their codes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import swapq
from swapq.hf import foreign_config
from tests.helpers.models import FAMILIES, prompts, qwen3_moe
from tests.helpers.recipes import tiny

RECIPES = ["nvfp4-rl", "mxfp8-rl"]


def opened(folder: Path, layout: str) -> PreTrainedModel:
    if layout == "modelopt":
        return AutoModelForCausalLM.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, config=foreign_config(folder))


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(prompts()).logits


def made(root: Path, recipe: str, layout: str, family: str = "qwen3_moe") -> Path:
    if not (root / "src").exists():
        FAMILIES[family]().to(torch.bfloat16).save_pretrained(root / "src")
    resolved = tiny(recipe, last_layers_bf16=0 if family == "deepseek_v3" else 1)
    swapq.convert_checkpoint(root / "src", root / layout, resolved, layout=layout, progress=False)
    return root / layout


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [(r, name) for r in RECIPES for name in ("modelopt", "compressed-tensors")]
    + [("fp8-block-rl", "compressed-tensors"), ("int4-qat", "compressed-tensors")],
)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_a_foreign_folder_computes_what_our_own_does_and_saves_as_ours(
    tmp_path: Path, family: str, recipe: str, layout: str
) -> None:
    ours = AutoModelForCausalLM.from_pretrained(made(tmp_path, recipe, "swapq", family))
    theirs = opened(made(tmp_path, recipe, layout, family), layout)
    if layout == "modelopt" or recipe != "nvfp4-rl":
        assert torch.equal(logits(theirs), logits(ours))
        assert swapq.digest(theirs) == swapq.digest(ours)
    else:  # the FP32 scale went through its reciprocal
        assert torch.allclose(logits(theirs), logits(ours), rtol=2e-2, atol=2e-2)
    assert [type(m).__name__ for m in theirs.modules()] == [type(m).__name__ for m in ours.modules()]
    theirs.save_pretrained(tmp_path / "again")
    assert (
        json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]["quant_method"] == "swapq"
    )
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits(theirs))


def test_a_pair_with_two_scales_is_refused_by_name(tmp_path: Path) -> None:
    folder = made(tmp_path, "nvfp4-rl", "compressed-tensors")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.2.up_proj.weight_global_scale"
    tensors[name] = tensors[name] * 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(swapq.SwapqError, match=r"experts\.2\.up_proj\.weight_scale_2 differs.*share one FP32 scale"):
        opened(folder, "compressed-tensors")


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_missing_scale_is_refused_by_name(tmp_path: Path, layout: str) -> None:
    folder = made(tmp_path, "nvfp4-rl", layout)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.2.up_proj." + (
        "weight_scale_2" if layout == "modelopt" else "weight_global_scale"
    )
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(swapq.SwapqError, match=f"lacks 1 quantized tensors.*{name}"):
        opened(folder, layout)


def test_experts_that_are_quantized_in_part_are_refused(tmp_path: Path) -> None:
    folder = made(tmp_path, "nvfp4-rl", "modelopt")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.2.up_proj.weight_scale"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(swapq.SwapqError, match="of its 16 expert weights are quantized"):
        opened(folder, "modelopt")


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_missing_norm_and_a_tensor_too_many_are_refused_by_name(tmp_path: Path, layout: str) -> None:
    folder = made(tmp_path, "nvfp4-rl", layout)
    tensors = load_file(folder / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(swapq.SwapqError, match=r"model\.norm\.weight"):
        opened(folder, layout)
    tensors |= {"model.norm.weight": norm, "model.layers.0.mlp.experts.2.up_proj.bias": torch.zeros(32)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(swapq.SwapqError, match=r"experts\.2\.up_proj\.bias"):
        opened(folder, layout)


def test_a_plain_folder_has_no_foreign_config(tmp_path: Path) -> None:
    qwen3_moe().save_pretrained(tmp_path)
    with pytest.raises(swapq.SwapqError, match="quant_method is None"):
        foreign_config(tmp_path)
