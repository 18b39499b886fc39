"""Files beside a checkpoint: weights that no loader reads, an index of other shards, names that are no text."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import swapq
from swapq.checkpoint.inspection import inspect
from swapq.checkpoint.record import RECORD_NAME
from swapq.cli import app
from swapq.errors import CheckpointError
from swapq.headers import read_folder
from tests.helpers.conversions import convert, file_hashes, saved

BESIDE = [
    "ema.safetensors",
    "adapter_model.safetensors",
    "a.safetensors",
    "zz.safetensors",
    "model-00001-of-00002.safetensors",
]


@pytest.mark.parametrize("name", BESIDE)
def test_a_single_file_is_the_checkpoint_whatever_weights_lie_beside_it(tmp_path: Path, name: str) -> None:
    """As transformers reads it."""
    src = saved(tmp_path / "src")
    convert(src, tmp_path / "plain")
    save_file({"x": torch.ones(2)}, src / name)
    assert read_folder(src).files == ("model.safetensors",)
    assert swapq.plan(src, "nvfp4-rl").quantized == swapq.plan(tmp_path / "src", "nvfp4-rl").quantized
    assert any(f"{name}: no part of the checkpoint" in note for note in inspect(src).notes)
    assert convert(src, tmp_path / "dst").left_out == (name,)
    assert file_hashes(tmp_path / "dst") == file_hashes(tmp_path / "plain")
    assert swapq.verify(tmp_path / "dst", source=src).ok


def test_a_checkpoint_with_weights_beside_it_is_loaded_into_a_live_model(tmp_path: Path) -> None:
    from tests.helpers.models import qwen3_moe

    model, other = qwen3_moe(), qwen3_moe()
    with torch.no_grad():
        other.lm_head.weight.add_(1)
    other.save_pretrained(tmp_path)
    save_file({"x": torch.ones(2)}, tmp_path / "ema.safetensors")
    swapq.load_checkpoint(model, tmp_path)
    assert torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_files_of_other_names_without_an_index_are_still_refused(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    (src / "model.safetensors").rename(src / "weights.safetensors")
    assert read_folder(src).files == ("weights.safetensors",)
    save_file({"x": torch.ones(2)}, src / "ema.safetensors")
    with pytest.raises(CheckpointError, match="nothing says that they are all"):
        read_folder(src)


@pytest.mark.parametrize(
    ("index", "advice"),
    [
        ({"x": "model-00001-of-00002.safetensors"}, r"names model-00001-of-00002\.safetensors, not in the folder: remove INDEX$"),
        ({"x": "model.safetensors"}, r"names no other file: remove INDEX$"),
        ({"x": "ema.safetensors"}, r"are all there: remove model\.safetensors to keep them, or else INDEX and them$"),
        (None, r"names no other file: remove INDEX$"),
    ],
)  # fmt: skip
def test_an_index_beside_a_single_file_is_refused_with_the_file_to_remove(
    tmp_path: Path, index: dict[str, str] | None, advice: str
) -> None:
    src = saved(tmp_path / "src")
    save_file({"x": torch.ones(2)}, src / "ema.safetensors")
    (src / "model.safetensors.index.json").write_text("{" if index is None else json.dumps({"weight_map": index}))
    for act in (
        read_folder,
        inspect,
        lambda folder: swapq.plan(folder, "nvfp4-rl"),
        lambda s: convert(s, tmp_path / "d"),
    ):
        with pytest.raises(CheckpointError, match=advice.replace("INDEX", r"model\.safetensors\.index\.json")):
            act(src)


@pytest.mark.parametrize(
    "name", [b"caf\xe9.txt", b"caf\xe9.bin", b"\xff.safetensors", b"sub\xe9/vocab.txt", b"sub/\x80", b"caf\xe9.py"]
)
def test_a_file_whose_name_is_not_utf8_is_refused_before_anything_is_written(tmp_path: Path, name: bytes) -> None:
    src, dst = saved(tmp_path / "src"), tmp_path / "dst"
    path = os.path.join(os.fsencode(src), name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write("x")
    with pytest.raises(CheckpointError, match=r"holds a file named b'.*\\x.*', which is not UTF-8; rename it"):
        convert(src, dst)
    assert not dst.exists()
    for options in ([], ["--json"]):
        said = CliRunner().invoke(app, ["plan", str(src), "-r", "nvfp4-rl", *options])
        assert said.exit_code == 0
        assert "is not UTF-8; rename it" in said.output
    inspect(src)


def test_the_only_shard_may_have_no_such_name_either(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    os.rename(src / "model.safetensors", os.path.join(os.fsencode(src), b"caf\xe9.safetensors"))
    for act in (inspect, lambda folder: swapq.plan(folder, "nvfp4-rl")):
        with pytest.raises(CheckpointError, match="is not UTF-8; rename it"):
            act(src)


def test_names_that_cannot_be_printed_are_said_by_verify_and_inspect(tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    convert(saved(tmp_path / "src"), dst)
    with open(os.path.join(os.fsencode(dst), b"caf\xe9.safetensors"), "w"):
        pass
    (problem,) = swapq.verify(dst).problems
    assert problem.encode().startswith(rb"caf\xe9.safetensors: lies beside the shards")
    assert any(note.startswith(r"caf\xe9.safetensors: no part") for note in inspect(dst).notes)


def test_scratch_beside_a_whole_folder_is_no_problem_of_the_folder(tmp_path: Path) -> None:
    """A command that was stopped before it removed anything, or after the record: convert says that it is done."""
    src, dst = saved(tmp_path / "src"), tmp_path / "dst"
    convert(src, dst)
    (dst / ".swapq").mkdir()
    report = swapq.verify(dst, source=src)
    assert report.ok
    assert any(".swapq" in note for note in report.notes)
    assert convert(src, dst).already_done
    (dst / ".swapq").mkdir()
    (dst / RECORD_NAME).unlink()
    assert any("unfinished" in problem for problem in swapq.verify(dst).problems)
    assert load_file(dst / "model.safetensors")


@pytest.mark.parametrize("leaf", ["bias", "input_scale"])
@pytest.mark.parametrize("recipe", ["nvfp4-rl", "mxfp8-rl"])
def test_what_one_expert_alone_has_is_said_by_plan_in_the_words_of_verify(
    tmp_path: Path, leaf: str, recipe: str
) -> None:
    src = saved(tmp_path / "src")
    plan = ["plan", str(src), "-r", recipe]
    assert "unsound" not in CliRunner().invoke(app, plan).output
    tensors = load_file(src / "model.safetensors")
    tensors[f"model.layers.0.mlp.experts.1.down_proj.{leaf}"] = torch.ones(
        64 if leaf == "bias" else 1, dtype=torch.bfloat16
    )
    save_file(tensors, src / "model.safetensors", metadata={"format": "pt"})
    convert(src, tmp_path / "dst", recipe)
    (problem,) = swapq.verify(tmp_path / "dst").problems
    said = CliRunner().invoke(app, plan)
    assert said.exit_code == 0
    assert f"swapq verify would call a conversion unsound: {problem}" in said.output
    told = json.loads(CliRunner().invoke(app, [*plan, "--json"]).output)
    assert any(problem in warning for warning in told["summary"]["warnings"])
