"""convert_checkpoint: the same bytes as the live path, whatever the shards and workers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import swapq
from swapq.checkpoint.card import model_card
from tests.helpers.conversions import convert, every, file_hashes, rewrite, same, saved
from tests.helpers.models import FAMILIES, prompts
from tests.helpers.recipes import SERVED, tiny

EXPORTED = [f for f in FAMILIES if f != "gpt_oss"]


@pytest.mark.parametrize("recipe", ["bf16", *SERVED])
@pytest.mark.parametrize("family", EXPORTED)
def test_a_folder_and_a_live_model_become_the_same_tensors(tmp_path: Path, family: str, recipe: str) -> None:
    src = tmp_path / "src"
    AutoModelForCausalLM.from_pretrained(saved(tmp_path / "raw", family)).save_pretrained(
        src
    )  # FP32 where the family has it
    convert(src, tmp_path / "a", tiny(recipe))
    live = swapq.convert(AutoModelForCausalLM.from_pretrained(src), tiny(recipe))
    swapq.export(live, tmp_path / "b")
    assert same(every(tmp_path / "a"), every(tmp_path / "b"))
    listed = [json.loads((tmp_path / d / "config.json").read_text())["quantization_config"] for d in "ab"]
    assert listed[0] == listed[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    if not swapq.recipe_of(live).matched:  # what is loaded is the rollout's policy, what trains is BF16
        live = swapq.convert(AutoModelForCausalLM.from_pretrained(src), tiny(recipe), trainable=False)
    with torch.no_grad():
        assert torch.equal(loaded(prompts()).logits, live(prompts()).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_masters_of_other_dtypes_become_bf16_first_and_the_rest_keeps_its_dtype(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    src = saved(tmp_path / "src", dtype=dtype)
    convert(src, tmp_path / "dst", "nvfp4-rl", workers=2)
    before, after = every(src), every(tmp_path / "dst")
    name = "model.layers.0.mlp.experts.2.down_proj.weight"
    assert torch.equal(after[name], swapq.quantize(before[name].to(torch.bfloat16), "nvfp4").codes)
    kept = [k for k in before if k in after and ".experts." not in k]
    assert kept
    assert same({k: before[k] for k in kept}, {k: after[k] for k in kept})


def test_workers_change_nothing(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    results = []
    for workers in (1, 2, 4):
        convert(src, tmp_path / str(workers), workers=workers, max_shard_size=30_000)
        results.append(file_hashes(tmp_path / str(workers)))
    assert len(results[0]) > 3
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("size", [1, 10_000, 100_000, "5GB"])
def test_output_shards_of_any_size_hold_the_same_tensors(tmp_path: Path, size: object) -> None:
    src = saved(tmp_path / "src")
    convert(src, tmp_path / "whole")
    convert(src, tmp_path / "dst", max_shard_size=size)
    assert same(every(tmp_path / "dst"), every(tmp_path / "whole"))
    assert swapq.digest(tmp_path / "dst") == swapq.digest(tmp_path / "whole")


def test_a_gate_and_its_up_in_different_source_shards_share_their_scale(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    convert(src, tmp_path / "whole")
    tensors = every(src)
    gates = {k: v for k, v in tensors.items() if ".gate_proj." in k}
    rewrite(src, [gates, {k: v for k, v in tensors.items() if k not in gates}])
    convert(src, tmp_path / "split", workers=2)
    assert same(every(tmp_path / "split"), every(tmp_path / "whole"))


def test_a_pair_of_very_different_halves_shares_one_scale(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    tensors = every(src)
    for name in tensors:
        if ".up_proj." in name:
            tensors[name] = tensors[name] * 8
    save_file(tensors, src / "model.safetensors", metadata={"format": "pt"})
    convert(src, tmp_path / "dst")
    after = every(tmp_path / "dst")
    stem = "model.layers.0.mlp.experts.1"
    assert torch.equal(after[f"{stem}.gate_proj.weight_scale_2"], after[f"{stem}.up_proj.weight_scale_2"])
    expected = swapq.quantize(
        tensors[f"{stem}.gate_proj.weight"], "nvfp4", amax=tensors[f"{stem}.up_proj.weight"].abs().amax().float()
    )
    assert torch.equal(after[f"{stem}.gate_proj.weight"], expected.codes)


def block_fp8(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """A source whose projections are FP8 in blocks, and the BF16 tensors that it means."""
    src = saved(folder, "deepseek_v3")
    config = json.loads((src / "config.json").read_text())
    expected: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    for name, t in every(src).items():
        if t.dim() == 2 and name.endswith("_proj.weight") and "layers" in name:
            scale = torch.full((-(-t.shape[0] // 128), -(-t.shape[1] // 128)), 0.0371)
            q = (t.float() / 0.0371 / 2).to(torch.float8_e4m3fn)
            stored |= {name: q, name + "_scale_inv": scale}
            expected[name] = (q.float() * torch.tensor(0.0371)).to(torch.bfloat16)
        else:
            stored[name] = expected[name] = t
    save_file(stored, src / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (src / "config.json").write_text(json.dumps(config))
    return src, expected


def test_a_block_fp8_source_is_dequantized_exactly_and_then_converted(tmp_path: Path) -> None:
    src, expected = block_fp8(tmp_path / "src")
    convert(src, tmp_path / "dst", "nvfp4-rl", workers=2)
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(expected, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((src / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    convert(plain, tmp_path / "from-plain", "nvfp4-rl")
    assert same(every(tmp_path / "dst"), every(tmp_path / "from-plain"))
    assert not any("scale_inv" in k for k in every(tmp_path / "dst"))
    said = model_card(tmp_path / "dst")
    count = sum(name.endswith("_scale_inv") for name in every(src)) - len(swapq.plan(src, "nvfp4-rl").quantized)
    assert f"but for {count} weights that are FP8 in the source" in said
    assert "FP8 in the source" not in model_card(tmp_path / "from-plain")


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.experts.0.up_proj.weight"]
)
def test_an_fp8_weight_that_is_not_finite_is_refused_by_name_also_where_it_stays_unquantized(
    tmp_path: Path, name: str
) -> None:
    src, _ = block_fp8(tmp_path / "src")
    tensors = every(src)
    tensors[name + "_scale_inv"].fill_(torch.nan)
    save_file(tensors, src / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(swapq.SwapqError, match=f"{name}: .* are not finite"):
        convert(src, tmp_path / "dst", "nvfp4-rl")
    assert not (tmp_path / "dst" / "config.json").exists()


def test_an_expert_of_zeros_and_one_of_tiny_values_come_out_finite(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    tensors = every(src)
    for name in tensors:
        if ".experts.1." in name:
            tensors[name] = torch.zeros_like(tensors[name])
        if ".experts.2." in name:
            tensors[name] = (tensors[name].float() * 1e-30).to(torch.bfloat16)
    save_file(tensors, src / "model.safetensors", metadata={"format": "pt"})
    for recipe in ("nvfp4-rl", "mxfp8-rl"):
        convert(src, tmp_path / recipe, recipe)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / recipe)
        q = model.model.layers[0].mlp.experts.quantized()["down_proj"].dequantize(torch.float32)
        assert q.isfinite().all()
        assert q[1].count_nonzero() == 0
        assert q[2].count_nonzero() > 0


def test_underflowed_blocks_are_counted(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    tensors = every(src)
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    tensors[name] = torch.full_like(tensors[name], 1e-9)
    tensors[name][0, 0] = 100.0
    save_file(tensors, src / "model.safetensors", metadata={"format": "pt"})
    done = convert(src, tmp_path / "dst")
    blocks = tensors[name].numel() // 16
    assert done.underflowed_blocks == blocks - 1
    assert json.loads((tmp_path / "dst" / "swapq.json").read_text())["underflowed_blocks"] == blocks - 1
