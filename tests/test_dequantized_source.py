"""Models that transformers dequantized while it loaded them: nothing of their old quantization comes back when they are saved."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedModel

import swapq
from swapq.checkpoint.tensors import checkpoint_tensors
from tests.helpers.models import qwen3_moe

SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128, "head_dim": 32}
Q = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts and attention in FP8 blocks of 128x128, as DeepSeek and Qwen publish them."""
    folder = tmp_path_factory.mktemp("fp8")
    qwen3_moe(**SIZES).to(torch.bfloat16).save_pretrained(folder)
    stored = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".experts." in name or name == Q:
            scale = tensor.float().abs().max() / 448
            stored[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.expand(tensor.shape[0] // 128, tensor.shape[1] // 128).contiguous()
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    left = ["lm_head", "mlp.gate", "k_proj", "v_proj", "o_proj", "layers.1.self_attn"]
    config["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "modules_to_not_convert": left,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def opened(folder: Path) -> PreTrainedModel:
    config = FineGrainedFP8Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)


@pytest.mark.parametrize("recipe", ["nvfp4-rl", "mxfp8-rl", "bf16"])
def test_an_export_holds_the_live_values_of_what_stays_in_bf16(folder: Path, tmp_path: Path, recipe: str) -> None:
    model = opened(folder)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    live = {name: p.detach().clone() for name, p in model.named_parameters()}
    model = swapq.convert(model, recipe, last_layers_bf16=0)
    swapq.export(model, tmp_path / "out")
    assert swapq.verify(tmp_path / "out").ok
    held = load_file(tmp_path / "out" / "model.safetensors")
    kept = [name for name in held if name in live and held[name].dtype == torch.bfloat16]
    assert kept
    assert all(torch.equal(held[name], live[name]) for name in kept)
    if recipe != "mxfp8-rl":
        assert Q in kept
    assert swapq.digest(model) == swapq.digest(tmp_path / "out")


def test_a_sync_sends_no_codes_of_the_old_quantization(folder: Path) -> None:
    model = swapq.convert(opened(folder), "nvfp4-rl", last_layers_bf16=0)
    sent = dict(checkpoint_tensors(model))
    assert sent[Q].dtype == torch.bfloat16
    assert f"{Q}_scale_inv" not in sent


def test_masters_are_saved_and_loaded_again(folder: Path, tmp_path: Path) -> None:
    model = swapq.convert(opened(folder), "nvfp4-rl", last_layers_bf16=0)
    model.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    assert {t.dtype for t in held.values()} == {torch.bfloat16}
    assert EXPERT in held
    again = swapq.convert(AutoModelForCausalLM.from_pretrained(tmp_path), "nvfp4-rl", last_layers_bf16=0)
    assert swapq.digest(again) == swapq.digest(model)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    swapq.load_checkpoint(again, tmp_path)
    assert swapq.digest(again) == swapq.digest(model)


def test_the_digest_of_a_model_that_is_not_converted_is_that_of_its_live_values(folder: Path) -> None:
    model = opened(folder)
    rules = model._weight_conversions
    found = swapq.digest(model)
    assert model._weight_conversions is rules
    assert found[Q] == swapq.digest(model.get_parameter(Q))
    assert EXPERT in found


def test_rules_without_a_quantizer_are_left_alone(tmp_path: Path) -> None:
    qwen3_moe(**SIZES).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    rules = model._weight_conversions
    assert rules
    swapq.convert(model, "nvfp4-rl")
    assert model._weight_conversions is rules
