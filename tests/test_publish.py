"""Inspect, model card and upload: what people see of a quantized folder before they download it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import swapq
from swapq.checkpoint.card import model_card, write_card
from swapq.checkpoint.inspection import inspect
from swapq.cli import app
from swapq.headers import read_folder
from swapq.plan_table import human_bytes
from tests.helpers.hub import FakeHub, serve_hub
from tests.helpers.models import FAMILIES, qwen3_moe
from tests.helpers.recipes import tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("publish")
    qwen3_moe().to(torch.bfloat16).save_pretrained(root / "src")
    swapq.convert_checkpoint(root / "src", root / "dst", "nvfp4-rl", progress=False)
    return root


# inspect


@pytest.mark.parametrize("family", FAMILIES)
def test_inspect_tells_the_roles_of_a_plain_folder(tmp_path: Path, family: str) -> None:
    FAMILIES[family]().to(torch.bfloat16).save_pretrained(tmp_path)
    found = inspect(tmp_path)
    assert found.layout == "none"
    assert found.family
    assert found.roles["routed_experts"]["tensors"] > 0
    assert sum(r["tensors"] for r in found.roles.values()) == found.tensors
    assert sum(r["bytes"] for r in found.dtypes.values()) == found.nbytes


def test_inspect_tells_what_a_quantized_folder_holds(made: Path) -> None:
    found = inspect(made / "dst")
    assert (found.quantization, found.layout) == ("swapq", "swapq")
    assert found.dtypes["uint8"]["tensors"] > 0
    assert any("48 quantized weights" in note for note in found.notes)


def test_inspect_looks_at_a_family_and_a_method_it_does_not_know(tmp_path: Path) -> None:
    save_file({"blocks.0.experts.0.w": torch.zeros(4, 4, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "nobody", "quantization_config": {"quant_method": "gptq"}})
    )
    found = inspect(tmp_path)
    assert found.quantization == "gptq"
    assert found.layout == "unknown"
    assert any("gptq" in note for note in found.notes)


def test_inspect_says_when_a_config_and_its_file_disagree(made: Path, tmp_path: Path) -> None:
    tensors = load_file(made / "dst" / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((made / "src" / "config.json").read_text())
    assert any("the config does not say so" in note for note in inspect(tmp_path).notes)


@pytest.mark.parametrize(("recipe", "layout"), [("bf16", "swapq"), ("int4-qat", "compressed-tensors")])
def test_inspect_finds_nothing_amiss_in_a_sound_folder(made: Path, tmp_path: Path, recipe: str, layout: str) -> None:
    swapq.convert_checkpoint(made / "src", tmp_path / "dst", tiny(recipe), layout=layout, progress=False)
    assert not any("none is stored" in note for note in inspect(tmp_path / "dst").notes)
    (tmp_path / "plain").mkdir()
    shutil.copy(made / "src" / "model.safetensors", tmp_path / "plain")
    config = json.loads((made / "src" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    assert any("none is stored" in note for note in inspect(tmp_path / "plain").notes)


def test_the_inspect_command_prints_tables_and_json(made: Path) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(made / "dst")])
    assert shown.exit_code == 0
    assert "routed_experts" in shown.output
    found = json.loads(CliRunner().invoke(app, ["inspect", str(made / "dst"), "--json"]).stdout)
    assert found["layout"] == "swapq"
    assert CliRunner().invoke(app, ["inspect", str(made / "nowhere")]).exit_code == 2


# card


def test_the_card_has_front_matter_that_the_hub_reads_and_measured_numbers(made: Path) -> None:
    text = model_card(
        made / "dst", base_model="owner/base", source=made / "src", command="swapq convert a b", license="apache-2.0"
    )
    data = ModelCard(text).data.to_dict()
    assert data["base_model"] == "owner/base"
    assert data["base_model_relation"] == "quantized"
    assert data["license"] == "apache-2.0"
    assert {"swapq", "quantized", "nvfp4"} <= set(data["tags"])
    report = swapq.verify(made / "dst", source=made / "src")
    assert f"{report.totals['bits_per_parameter']:.2f}" in text
    assert f"{report.totals['by_role']['routed_experts']['rel_error']:.5f}" in text
    assert "swapq convert a b" in text
    assert yaml.safe_load(text.split("---")[1])["library_name"] == "transformers"


def test_a_card_is_not_written_for_a_folder_that_does_not_verify(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "dst", tmp_path / "dst")
    tensors = load_file(tmp_path / "dst" / "model.safetensors")
    tensors.pop("model.layers.0.mlp.experts.0.up_proj.weight_scale")
    save_file(tensors, tmp_path / "dst" / "model.safetensors")
    with pytest.raises(swapq.SwapqError, match="does not verify"):
        write_card(tmp_path / "dst")


@pytest.mark.parametrize("name", ["./model", "/models/base", "base", "a/b/c", "a\\b"])
def test_a_path_is_no_base_model(made: Path, name: str) -> None:
    with pytest.raises(swapq.SwapqError, match="owner/name"):
        model_card(made / "dst", base_model=name)


# upload


def upload(hub: FakeHub, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "HF_ENDPOINT": hub.address,
        "HF_TOKEN": "hf_test",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }
    environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [sys.executable, "-m", "swapq", *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_convert_uploads_the_whole_folder_in_one_commit(made: Path, tmp_path: Path) -> None:
    with serve_hub() as hub:
        done = upload(
            hub,
            *("convert", str(made / "src"), str(tmp_path / "dst"), "--recipe", "nvfp4-rl"),
            *("--push-to-hub", "me/tiny-nvfp4", "--base-model", "owner/base"),
        )
        assert done.returncode == 0, done.stderr
        assert hub.repositories == ["me/tiny-nvfp4"]
        assert len(hub.commits) == 1
        assert "uploaded: http://127.0.0.1" in done.stdout
    uploaded = {name for name in hub.files if not name.startswith(".")}
    assert uploaded == {p.name for p in (tmp_path / "dst").iterdir()}
    for name in uploaded:
        assert hub.files[name] == (tmp_path / "dst" / name).read_bytes()
    assert ModelCard(hub.files["README.md"].decode()).data.to_dict()["base_model"] == "owner/base"
    assert "--recipe nvfp4-rl" in hub.files["README.md"].decode()


def test_a_refusal_of_the_hub_is_one_clear_error_and_the_folder_stays(made: Path, tmp_path: Path) -> None:
    with serve_hub() as hub:
        hub.refuse = True
        done = upload(
            hub, "convert", str(made / "src"), str(tmp_path / "dst"), "--recipe", "nvfp4-rl", "--push-to-hub", "me/x"
        )
    assert done.returncode == 2
    assert "error: me/x: the Hub refused" in done.stderr
    assert swapq.verify(tmp_path / "dst").ok


def test_a_card_that_replaces_another_readme_says_so(made: Path, tmp_path: Path) -> None:
    src, dst = Path(shutil.copytree(made / "src", tmp_path / "src")), tmp_path / "dst"
    (src / "README.md").write_text("# The base model\n")
    swapq.convert_checkpoint(src, dst, "nvfp4-rl", progress=False)

    def note(folder: Path) -> str:
        result = CliRunner().invoke(app, ["card", str(folder)])
        assert result.exit_code == 0, result.output
        assert "Made by swapq" in (folder / "README.md").read_text()
        return result.stderr

    assert (
        f"note: {dst / 'README.md'} was there before (the source's, copied by the conversion) and is replaced"
        in note(dst)
    )
    assert note(dst) == "", "a card of swapq's own"
    own = Path(shutil.copytree(made / "dst", tmp_path / "own"))
    assert note(own) == ""
    (own / "README.md").write_text("mine")
    assert "(not written by swapq)" in note(own)


@pytest.mark.parametrize("layout", ["swapq", "modelopt"])
@pytest.mark.parametrize("size", ["5GB", "30000"])
def test_every_command_counts_the_same_bytes(made: Path, tmp_path: Path, layout: str, size: str) -> None:
    def said(*arguments: object) -> str:
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert result.exit_code == 0, result.output
        return result.stdout.replace("\n", " ")

    src, dst = made / "src", tmp_path / "dst"
    options = ("--layout", layout, "--max-shard-size", size)
    counted = human_bytes(sum(t.nbytes for t in read_folder(made / "src").tensors.values()))
    planned = said("plan", src, "-r", "nvfp4-rl")
    converted = said("convert", src, dst, "-r", "nvfp4-rl", *options)
    exact = swapq.verify(dst).totals["bytes"]
    assert f"{counted} -> {human_bytes(exact)} of tensors in {dst}" in converted
    assert f"bytes: {exact:,} ({human_bytes(exact)} of tensors)" in said("verify", dst)
    assert f"tensors, {human_bytes(exact)} in" in said("inspect", dst)
    if layout == "swapq":
        assert f"{counted} -> {human_bytes(exact)} (" in planned
    on_disk = sum(p.stat().st_size for p in dst.glob("*.safetensors"))
    assert f"({human_bytes(on_disk)} in files)" in converted


def test_a_folder_that_is_converted_already_is_refused_by_its_name(made: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["convert", str(made / "dst"), str(tmp_path / "again"), "-r", "nvfp4-rl"])
    assert result.exit_code == 2
    assert f"{made / 'dst' / 'config.json'}: quantization_config: this checkpoint is already converted" in result.stderr
