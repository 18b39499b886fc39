"""Public faults 53 to 60: what is written, what a damaged or lying folder does, and what is never overwritten."""

import copy
import os
import stat
from pathlib import Path

import pytest
import torch
from torch import nn

import swapq
from tests.helpers.families import qwen_config, qwen_headers, write_folder
from tests.helpers.models import qwen3_moe
from tests.public_faults.common import RECIPES, converted, edit_config, exported, load, logits


def transposed(x: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(x.detach().transpose(-1, -2).contiguous().transpose(-1, -2))


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_53_parameters_of_any_strides_are_saved_with_the_right_values(
    tmp_path: Path, recipe: str, trainable: bool
) -> None:
    model, plain = qwen3_moe(), converted(recipe, trainable=trainable)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight = transposed(layer.self_attn.q_proj.weight)
        layer.mlp.experts.gate_up_proj = transposed(layer.mlp.experts.gate_up_proj)
        layer.mlp.gate.weight = transposed(layer.mlp.gate.weight)
        layer.input_layernorm.weight = nn.Parameter(torch.stack((layer.input_layernorm.weight.detach(),) * 2, 1)[:, 0])
    converted(recipe, model, trainable=trainable)
    swapq.export(model, tmp_path / "export")
    assert swapq.digest(tmp_path / "export") == swapq.digest(model) == swapq.digest(plain)
    model.save_pretrained(tmp_path / "saved")
    plain.save_pretrained(tmp_path / "plain")
    assert swapq.digest(tmp_path / "saved") == swapq.digest(tmp_path / "plain")


@pytest.mark.parametrize(("promised", "held"), [(8, 6), (6, 8)])
def test_55_a_config_that_disagrees_with_the_headers_on_experts_is_refused(
    tmp_path: Path, promised: int, held: int
) -> None:
    folder = write_folder(tmp_path / "source", qwen_config(num_experts=promised), qwen_headers(experts=held))
    with pytest.raises(swapq.SwapqError, match=r"experts\.6\.gate_proj\.weight" if promised > held else "8 are there"):
        swapq.plan(folder, "nvfp4-rl")
    exported(tmp_path / "export")
    edit_config(tmp_path / "export", lambda c: c.update(num_local_experts=promised + 1 if promised == 8 else 6))
    with pytest.raises(swapq.SwapqError, match=r"experts\.[68]\."):
        load(tmp_path / "export")


@pytest.mark.parametrize("size", ["5GB", 40_000])
@pytest.mark.parametrize("cut", [1, 1024, 20_000])
def test_56_a_truncated_shard_is_refused_by_name(tmp_path: Path, size: object, cut: int) -> None:
    exported(tmp_path, max_shard_size=size)
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - cut)
    for read in (load, swapq.digest):
        with pytest.raises(swapq.SwapqError, match=last.name.replace(".", r"\.")):
            read(tmp_path)
    assert any(last.name in problem for problem in swapq.verify(tmp_path).problems)


def test_56_a_shard_that_was_never_downloaded_is_refused_by_name(tmp_path: Path) -> None:
    exported(tmp_path, max_shard_size=40_000)
    first = min(tmp_path.glob("*.safetensors"))
    first.unlink()
    for read in (load, swapq.digest):
        with pytest.raises(swapq.SwapqError, match=first.name.replace(".", r"\.")):
            read(tmp_path)


def test_58_a_source_with_scales_of_another_spelling_is_refused_by_name(tmp_path: Path) -> None:
    fp8 = {k: ("F8_E4M3" if "_proj" in k else d, s) for k, (d, s) in qwen_headers().items()}
    fp8 |= {k.replace(".weight", ".scale"): ("F32", (1, 1)) for k in fp8 if "_proj" in k}
    declared = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    for config, message in (
        (qwen_config(**declared), r"q_proj\.weight_scale_inv"),
        (qwen_config(), r"q_proj\.weight.*float8"),
    ):
        folder = write_folder(tmp_path / message[:3] / str(len(config)), config, fp8)
        with pytest.raises(swapq.SwapqError, match=message):
            swapq.plan(folder, "nvfp4-rl")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_59_every_file_has_the_mode_that_the_umask_gives(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        exported(tmp_path / "export", max_shard_size=40_000)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "export").iterdir()} == {mode}


def test_60_an_export_never_replaces_its_source(tmp_path: Path) -> None:
    qwen3_moe().save_pretrained(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    model = converted(model=load(tmp_path))
    with pytest.raises(swapq.SwapqError, match="swapq did not write"):
        swapq.export(model, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("recipe", RECIPES)
def test_60_saving_over_the_export_that_the_codes_are_mapped_from_changes_no_byte(tmp_path: Path, recipe: str) -> None:
    exported(tmp_path, recipe)
    model = load(tmp_path)
    expected, seen = swapq.digest(model), logits(model)
    for _ in range(2):
        swapq.export(model, tmp_path)
        assert swapq.digest(tmp_path) == swapq.digest(model) == expected
    model.save_pretrained(tmp_path)
    assert swapq.digest(tmp_path) == swapq.digest(model) == expected
    assert torch.equal(logits(model), seen)


def test_60_an_export_that_fails_leaves_the_earlier_one_whole(tmp_path: Path) -> None:
    exported(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    broken = copy.deepcopy(converted())
    with torch.no_grad():
        broken.model.layers[1].mlp.experts.down_proj[0, 0, 0] = torch.nan
    with pytest.raises(swapq.SwapqError, match="not finite"):
        swapq.export(broken, tmp_path)
    for size in (True, "five", 0, -1, 2.5, None):
        with pytest.raises(swapq.SwapqError, match="max_shard_size"):
            swapq.export(converted(), tmp_path, max_shard_size=size)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
