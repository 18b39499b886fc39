"""The command line: answers on stdout, one line of error on stderr, exit codes 0 and 2."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from swapq.cli import app
from swapq.plan import plan
from swapq.recipe import Recipe, names
from tests.helpers.families import qwen_config, qwen_headers, write_folder
from tests.helpers.models import FAMILIES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_folder(tmp_path_factory.mktemp("cli"), qwen_config(), qwen_headers()))


def run(*args):
    return CliRunner().invoke(app, list(args))


def test_plan_prints_the_table(folder):
    result = run("plan", folder, "--recipe", "nvfp4-rl")
    assert result.exit_code == 0, result.stderr
    assert "bits per parameter" in result.stdout
    assert "nvfp4" in result.stdout


def test_a_plan_says_that_float32_tensors_which_are_not_quantized_stay_float32(folder, tmp_path):
    wide = str(write_folder(tmp_path, qwen_config(), qwen_headers(dtype="F32")))
    kept = [entry for entry in plan(wide, "nvfp4-rl") if not entry.quantized]
    assert f"{len(kept)} of those that stay are float32" in run("plan", wide, "--recipe", "nvfp4-rl").stdout
    assert "float32" not in run("plan", folder, "--recipe", "nvfp4-rl").stdout


def test_plan_json_is_the_plan(folder):
    result = run("plan", folder, "--recipe", "nvfp4-rl", "--tp", "2", "--json")
    made = plan(folder, "nvfp4-rl", tp=2)
    assert json.loads(result.stdout) == json.loads(json.dumps(made.to_dict()))


def test_recipes_lists_what_there_is_and_which_sides_go_together():
    result = run("recipes")
    assert result.exit_code == 0
    for name in names():
        assert name in result.stdout
    assert "TWO POLICIES" in result.stdout
    assert "training (down) and rollout (across)" in result.stdout
    assert "differs: two policies" in result.stdout
    told = json.loads(run("recipes", "--json").stdout)
    assert [r["name"] for r in told["recipes"]] == names()
    assert [r["name"] for r in told["recipes"] if not r["matched"]] == ["fp8-rollout"]
    pairs = {(p["training"], p["rollout"]): p["status"] for p in told["support"]}
    assert pairs["bf16", "fp8_block"] == "differs"
    assert pairs["bf16", "nvfp4"] == "refused"
    assert pairs["nvfp4_tile", "nvfp4_tile"] == "forced"


def test_a_plan_of_two_policies_says_so_in_title_totals_and_json(folder):
    result = run("plan", folder, "--recipe", "fp8-rollout")
    assert result.exit_code == 0
    assert "with fp8-rollout (two different policies)" in result.stdout
    assert "warning: training bf16, rollout fp8_block: two different policies" in result.stdout
    told = json.loads(run("plan", folder, "--recipe", "fp8-rollout", "--json").stdout)["summary"]
    assert told["matched"] is False
    assert "two different policies" not in run("plan", folder, "--recipe", "fp8-block-rl").stdout


def test_a_plan_of_what_is_not_for_rollouts_says_so_and_a_conversion_refuses(folder, tmp_path):
    assert "warning: not for RL rollouts" in run("plan", folder, "--recipe", "nvfp4-pretrain").stdout
    result = run("convert", folder, str(tmp_path / "out"), "--recipe", "nvfp4-pretrain")
    assert result.exit_code == 2
    assert "is not for rollouts" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["plan", "/nowhere", "--recipe", "bf16"], "error: /nowhere: no such folder\n"),
        (
            ["plan", "some-owner/some-model", "--recipe", "bf16"],
            "download it first: hf download some-owner/some-model --local-dir FOLDER",
        ),
        (["plan", __file__, "--recipe", "bf16"], "is a file; give the folder"),
        (["convert", "a", "--recipe", "bf16"], "(see `swapq convert --help`)"),
        (["plan", "FOLDER", "--recipe", "nvfp5"], "unknown recipe 'nvfp5'"),
        (["plan", "FOLDER", "--recipe", "int4-qat"], "give this role the format int4_g32, or add"),
        (["plan", "FOLDER", "--recipe", "nvfp4-rl", "--tp", "4"], "over tp = 4"),
        (["plan", "FOLDER", "--recipe", "nvfp4-rl", "--tp", "0"], "at least 1"),
        (["plan", "FOLDER", "--recipe", "nvfp4-rl", "--tpp", "4"], "--tpp"),
        (["plan", "FOLDER", "--recipe", "nvfp4-rl", "--tp", "x"], "'--tp'"),
        (["plan", "FOLDER"], "recipe"),
        (["plan", "FOLDER", "--recipe", "/nowhere.json"], "cannot be read"),
    ],
)
def test_a_request_that_cannot_be_carried_out_is_one_line_and_exit_code_2(folder, args, says):
    result = run(*[folder if a == "FOLDER" else a for a in args])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_each_word_of_the_support_matrix_is_explained_on_one_line():
    lines = run("recipes").stdout.splitlines()
    matrix = lines.index(next(line for line in lines if line.startswith("training (down)")))
    words = {word for line in lines[matrix + 2 :] if ": " not in line for word in line.split()[1:]}
    explained = [line.partition(": ")[0] for line in lines[matrix + 2 :] if ": " in line]
    assert sorted(explained) == sorted(words)
    assert "refused" in words


def test_python_m_swapq_is_the_command_line():
    done = subprocess.run([sys.executable, "-m", "swapq", "recipes"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "nvfp4-rl" in done.stdout
    assert "Traceback" not in done.stderr


def test_the_advice_for_int4_can_be_followed_from_the_command_line(folder, tmp_path):
    said = run("plan", folder, "--recipe", "int4-qat").stderr
    fields = said.partition("--recipe FILE.json, with ")[2]
    (tmp_path / "mine.json").write_text(fields)
    assert json.loads(fields) == {"name": "int4-qat", "weights": {"routed_experts": "int4_g32"}}
    assert run("plan", folder, "--recipe", str(tmp_path / "mine.json")).exit_code == 0


def test_the_advice_to_keep_something_names_the_field_of_the_file(tmp_path):
    narrow = str(write_folder(tmp_path, qwen_config(moe_intermediate_size=40), qwen_headers(inner=40)))
    said = run("plan", narrow, "--recipe", "nvfp4-rl").stderr
    assert 'On the command line: --recipe FILE.json, with {"name": "nvfp4-rl", "keep_bf16": ["..."]}' in said
    (tmp_path / "own.json").write_text(json.dumps(Recipe.named("nvfp4-rl").to_dict() | {"name": "own"}))
    said = run("plan", narrow, "--recipe", str(tmp_path / "own.json")).stderr
    assert 'On the command line: --recipe FILE.json, with this in it: "keep_bf16": ["..."]' in said


def test_a_plan_warns_in_the_words_in_which_a_conversion_refuses(tmp_path):
    FAMILIES["gpt_oss"]().to(torch.bfloat16).save_pretrained(tmp_path / "src")
    reason = "no engine reads per-expert tensors of a family with interleaved gate and up"
    refused = run("convert", str(tmp_path / "src"), str(tmp_path / "dst"), "--recipe", "nvfp4-rl")
    assert refused.exit_code == 2
    assert reason in refused.stderr
    planned = run("plan", str(tmp_path / "src"), "--recipe", "nvfp4-rl")
    assert planned.exit_code == 0
    assert planned.stdout.count(reason) == 1
    assert f"warning: conversion and export refuse it: {reason}" in planned.stdout
    assert any(reason in w for w in plan(FAMILIES["gpt_oss"](), Recipe.named("nvfp4-rl", last_layers_bf16=0)).warnings)


def ghost_scale(src):
    tensors = load_file(src / "model.safetensors") | {"ghost.weight_scale": torch.ones(1, 1)}
    save_file(tensors, src / "model.safetensors", metadata={"format": "pt"})


def link_outside(src):
    (src / "tokenizer.json").symlink_to("/etc/hostname")


def integer_scales(src):
    """Floats are numbers; an integer is a number or an E8M0 byte, and nobody says which."""
    tensors = load_file(src / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        tensors |= {
            name: tensors[name].to(torch.float8_e4m3fn),
            f"{name}_scale_inv": torch.ones(1, 1, dtype=torch.int32),
        }
    save_file(tensors, src / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((src / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (src / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("change", [ghost_scale, link_outside, integer_scales])
def test_what_a_conversion_refuses_by_headers_and_names_a_plan_warns_of(tmp_path, change):
    src = tmp_path / "src"
    FAMILIES["qwen3_moe"]().to(torch.bfloat16).save_pretrained(src)
    told = json.loads(run("plan", str(src), "--recipe", "nvfp4-rl", "--json").stdout)
    assert not any("convert refuses" in w for w in told["summary"]["warnings"])
    change(src)
    refused = run("convert", str(src), str(tmp_path / "dst"), "--recipe", "nvfp4-rl")
    assert refused.exit_code == 2
    reason = refused.stderr.removeprefix("error: ").strip()
    assert f"warning: swapq convert refuses it: {reason}" in run("plan", str(src), "--recipe", "nvfp4-rl").stdout
    told = json.loads(run("plan", str(src), "--recipe", "nvfp4-rl", "--json").stdout)
    assert f"swapq convert refuses it: {reason}" in told["summary"]["warnings"]


def test_a_dense_model_is_told_which_recipes_reach_it(tmp_path):
    headers = {n: h for n, h in qwen_headers().items() if ".mlp." not in n}
    config = {k: v for k, v in qwen_config().items() if "expert" not in k} | {"model_type": "qwen3"}
    folder = str(write_folder(tmp_path, config, headers))
    said = run("plan", folder, "--recipe", "nvfp4-rl").stderr
    assert "matched no expert in this dense checkpoint, which has no routed experts; 'mxfp8-rl' and" in said
    assert run("plan", folder, "--recipe", "mxfp8-rl").exit_code == 0


@pytest.mark.parametrize("recipe", ["nvfp4-rl", "mxfp8-rl"])
def test_an_unknown_architecture_is_called_one(tmp_path, recipe):
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=64)).save_pretrained(tmp_path)
    said = run("plan", str(tmp_path), "--recipe", recipe).stderr
    assert "model_type 'gpt2' is none of the families that swapq knows (deepseek_v2, " in said
    assert "qwen3_moe" in said
    assert "c_attn.weight" in said
