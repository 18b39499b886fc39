"""The command line: answers on stdout, one line of error on stderr, exit codes 0 and 2."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from swapq.cli import app
from swapq.plan import plan
from swapq.recipe import names
from tests.helpers.families import qwen_config, qwen_headers, write_folder


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
        (["plan", "FOLDER", "--recipe", "int4-qat"], "or give this role the format int4_g32"),
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
