"""verify: a sound folder passes, every kind of fault is a sentence that names the tensor, and errors are measured from the source."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import swapq
from swapq.checkpoint import layouts
from swapq.cli import app
from tests.helpers.conversions import convert, every, saved
from tests.helpers.models import FAMILIES, qwen3_moe
from tests.helpers.recipes import tiny

RECIPES = ["nvfp4-rl", "mxfp8-rl", "fp8-block-rl", "int4-qat"]
PAIRS = [
    (r, name)
    for r in RECIPES
    for name in layouts.names()
    if swapq.Recipe.named(r).formats[0] in layouts.get(name).formats
]
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verify")
    qwen3_moe().to(torch.bfloat16).save_pretrained(root / "src")
    for recipe, layout in PAIRS:
        swapq.convert_checkpoint(root / "src", root / f"{recipe}-{layout}", tiny(recipe), layout=layout, progress=False)
    return root


@pytest.mark.parametrize(("recipe", "layout"), PAIRS)
def test_a_conversion_verifies_alone_and_beside_its_source(made: Path, recipe: str, layout: str) -> None:
    folder = made / f"{recipe}-{layout}"
    alone = swapq.verify(folder)
    assert alone.problems == []
    assert alone.totals["layout"] == layout
    beside = swapq.verify(folder, source=made / "src")
    assert beside.problems == []
    assert set(beside.tensors) == set(swapq.plan(made / "src", tiny(recipe)).quantized)
    for row in beside.tensors.values():
        assert 0.005 < row["rel_error"] < 0.2
        assert 14 < row["sqnr_db"] < 45
        assert row["underflowed_blocks"] == 0


@pytest.mark.parametrize("recipe", ["bf16", *RECIPES])
def test_an_export_of_a_live_model_verifies_beside_the_source(made: Path, tmp_path: Path, recipe: str) -> None:
    model = swapq.convert(qwen3_moe().to(torch.bfloat16), tiny(recipe))
    swapq.export(model, tmp_path)
    report = swapq.verify(tmp_path, source=made / "src")
    assert report.problems == []
    assert report.notes == []


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gpt_oss"])
def test_every_family_verifies_beside_its_source(tmp_path: Path, family: str) -> None:
    FAMILIES[family]().to(torch.bfloat16).save_pretrained(tmp_path / "src")
    for recipe in RECIPES:
        swapq.convert_checkpoint(tmp_path / "src", tmp_path / recipe, tiny(recipe), progress=False)
        assert swapq.verify(tmp_path / recipe, source=tmp_path / "src").problems == []


def test_bits_per_parameter_say_what_the_file_holds(made: Path) -> None:
    totals = swapq.verify(made / "nvfp4-rl-swapq").totals
    size = sum(p.stat().st_size for p in (made / "nvfp4-rl-swapq").glob("*.safetensors"))
    parameters = sum(t.numel() for t in load_file(made / "src" / "model.safetensors").values())
    assert totals["parameters"] == parameters
    assert totals["bytes"] <= size
    assert totals["bits_per_parameter"] == pytest.approx(8 * totals["bytes"] / parameters, abs=1e-3)


# Faults


def damaged(made: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], layout: str = "swapq") -> Path:
    folder = tmp_path / "damaged"
    shutil.copytree(made / f"nvfp4-rl-{layout}", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "swapq.json").unlink()  # the fault must be found without the hashes
    return folder


def flip(t: Tensor) -> None:
    t.view(torch.uint8).view(-1)[3] ^= 1


STRUCTURAL: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "a missing block scale": (lambda t: t.pop(EXPERT + "_scale"), EXPERT + "_scale: missing"),
    "a missing FP32 scale": (lambda t: t.pop(EXPERT + "_scale_2"), EXPERT + "_scale_2: missing"),
    "missing codes": (lambda t: t.pop(EXPERT), EXPERT + ": listed as nvfp4 and missing"),
    "BF16 where codes belong": (
        lambda t: t.update({EXPERT: torch.zeros(32, 64, dtype=torch.bfloat16)}),
        EXPERT + ": stored as bfloat16",
    ),
    "codes that are not listed": (
        lambda t: t.update({"model.layers.1.mlp.gate.weight": torch.zeros(8, 32, dtype=torch.uint8)}),
        "model.layers.1.mlp.gate.weight: stored as uint8",
    ),
    "a misspelt scale": (
        lambda t: t.update(
            {EXPERT + "_scale_inv_scale": t.pop(EXPERT + "_scale"), "x.weight_scale": torch.zeros(2, 2)}
        ),
        "x.weight_scale: stored as float32, which is quantized",
    ),
    "gate and up scales that differ": (
        lambda t: t.update({EXPERT + "_scale_2": t[EXPERT + "_scale_2"] * 2}),
        "FP32 scales",
    ),
    "a FP32 scale of zero": (
        lambda t: t.update({k: torch.zeros(()) for k in t if k.endswith("experts.3.down_proj.weight_scale_2")}),
        "experts.3.down_proj.weight_scale_2: the FP32 scale is 0",
    ),
    "a FP32 scale that is infinite": (
        lambda t: t.update({k: torch.tensor(torch.inf) for k in t if k.endswith("experts.3.down_proj.weight_scale_2")}),
        "1 of 1 scales are not finite",
    ),
    "a NaN block scale": (lambda t: t[EXPERT + "_scale"].view(torch.uint8).fill_(0x7F), EXPERT + "_scale: 128 of 128"),
    "a block scale below zero": (
        lambda t: t[EXPERT + "_scale"].view(torch.uint8)[0].bitwise_or_(0x80),
        EXPERT + "_scale: 4 of 128 block scales are below zero",
    ),
    "an expert that is gone from the file": (
        lambda t: [t.pop(k) for k in list(t) if ".layers.1.mlp.experts.7." in k],
        "model.layers.1.mlp.experts.7.",
    ),
}


@pytest.mark.parametrize("fault", STRUCTURAL)
def test_a_structural_fault_is_found_without_the_source(made: Path, tmp_path: Path, fault: str) -> None:
    change, message = STRUCTURAL[fault]
    report = swapq.verify(damaged(made, tmp_path, change))
    assert not report.ok
    assert any(message in problem for problem in report.problems), report.problems


VALUES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "one flipped bit in the codes": (lambda t: flip(t[EXPERT]), EXPERT + ": 1 of 1024 bytes differ"),
    "one flipped bit in a block scale": (lambda t: flip(t[EXPERT + "_scale"]), EXPERT + "_scale: 1 of"),
    "swapped nibbles": (lambda t: t.update({EXPERT: (t[EXPERT] >> 4) | (t[EXPERT] << 4)}), EXPERT + ":"),
    "an FP32 scale rounded to a power of two": (
        lambda t: [
            t.update({k: torch.exp2(torch.log2(v).round())}) for k, v in list(t.items()) if k.endswith("scale_2")
        ],
        "weight_scale_2: ",
    ),
    "one flipped bit in a norm": (
        lambda t: flip(t["model.norm.weight"]),
        "model.norm.weight: not quantized, and not bit-identical",
    ),
    "a norm in another dtype": (
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"].float()}),
        "model.norm.weight: not quantized, and stored as float32, bfloat16 in the source; only the dtype differs",
    ),
    "a tensor too many": (
        lambda t: t.update({"extra.weight": torch.zeros(4)}),
        "extra.weight: is not made from any tensor",
    ),
    "two experts exchanged": (
        lambda t: t.update(
            {EXPERT: t[EXPERT.replace("experts.3", "experts.4")], EXPERT.replace("experts.3", "experts.4"): t[EXPERT]}
        ),
        EXPERT + ":",
    ),
}


@pytest.mark.parametrize("fault", VALUES)
def test_a_wrong_value_is_found_beside_the_source(made: Path, tmp_path: Path, fault: str) -> None:
    change, message = VALUES[fault]
    report = swapq.verify(damaged(made, tmp_path, change), source=made / "src")
    assert not report.ok
    assert any(message in problem for problem in report.problems), report.problems


def test_a_changed_shard_is_found_by_its_hash(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(made / "nvfp4-rl-swapq", folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-5, 2)
        byte = file.read(1)
        file.seek(-5, 2)
        file.write(bytes([byte[0] ^ 1]))
    assert any("SHA-256" in problem for problem in swapq.verify(folder).problems)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_faults_are_found_in_the_other_layouts_too(made: Path, tmp_path: Path, layout: str) -> None:
    stem = EXPERT.removesuffix(".weight")
    gone = {"modelopt": f"{stem}.input_scale", "compressed-tensors": f"{stem}.weight_global_scale"}[layout]
    report = swapq.verify(damaged(made, tmp_path, lambda t: t.pop(gone), layout))
    assert any(gone in problem for problem in report.problems), report.problems


def test_a_config_that_promises_more_experts_than_there_are_is_found(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(made / "nvfp4-rl-swapq", folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_experts"] = 10
    (folder / "config.json").write_text(json.dumps(config))
    assert any("config.json says 10 experts, 8 have" in problem for problem in swapq.verify(folder).problems)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda f: (f / "config.json").unlink(),
        lambda f: (f / "config.json").write_text("{"),
        lambda f: (f / "model.safetensors").write_bytes(b"short"),
        lambda f: (f / "swapq.json").write_text("[]"),
        lambda f: shutil.rmtree(f),
        lambda f: (f / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}'),
        lambda f: (f / "config.json").write_text('{"model_type": "qwen3_moe"}'),
    ],
    ids=["no config", "broken config", "short shard", "broken record", "no folder", "another method", "no claim"],
)
def test_verify_raises_nothing_and_says_what_is_wrong(
    made: Path, tmp_path: Path, break_it: Callable[[Path], object]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(made / "nvfp4-rl-swapq", folder)
    break_it(folder)
    report = swapq.verify(folder, source=made / "src")
    assert not report.ok
    assert all(len(problem) > 10 for problem in report.problems)


def test_a_code_that_is_not_a_number_is_found_without_the_hashes(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(made / "mxfp8-rl-swapq", folder)
    (folder / "swapq.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    tensors[EXPERT].view(torch.uint8)[0, :3] = 0xFF
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"{EXPERT}: 3 of 2048 codes are NaN" in swapq.verify(folder).problems


# The record


@pytest.fixture(params=["conversion", "export"])
def finished(request: pytest.FixtureRequest, made: Path, tmp_path: Path) -> Path:
    """A folder of layout modelopt, in several shards."""
    recipe = tiny("nvfp4-rl")
    options = {"layout": "modelopt", "max_shard_size": 60_000}
    if request.param == "conversion":
        swapq.convert_checkpoint(made / "src", tmp_path / "folder", recipe, progress=False, **options)
    else:
        swapq.export(swapq.convert(qwen3_moe().to(torch.bfloat16), recipe), tmp_path / "folder", **options)
    return tmp_path / "folder"


@pytest.mark.parametrize("layout", layouts.names())
def test_a_changed_byte_of_any_tensor_of_an_export_is_found_without_a_source(tmp_path: Path, layout: str) -> None:
    swapq.export(swapq.convert(qwen3_moe().to(torch.bfloat16), tiny("nvfp4-rl")), tmp_path, layout=layout)
    assert swapq.verify(tmp_path).problems == []
    shard = tmp_path / "model.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    assert any(p.startswith("model.safetensors: its SHA-256") for p in swapq.verify(tmp_path).problems)


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "model.safetensors.index.json", "swapq.json"])
def test_a_value_that_changed_in_a_config_or_in_the_record_is_found_and_the_file_is_named(
    finished: Path, name: str
) -> None:
    assert swapq.verify(finished).problems == []
    path = finished / name
    content = json.loads(path.read_text())
    for key in content:
        path.write_text(json.dumps(content | {key: {"another": "value"}}))
        assert any(name in problem for problem in swapq.verify(finished).problems), key
        path.write_text(json.dumps({other: value for other, value in content.items() if other != key}))
        assert any(name in problem for problem in swapq.verify(finished).problems), f"without {key}"


def test_a_record_of_an_earlier_version_that_hashes_the_shards_alone_is_believed(finished: Path) -> None:
    content = json.loads((finished / "swapq.json").read_text())
    earlier = {key: value for key, value in content.items() if key not in ("record_sha256", "configs")}
    (finished / "swapq.json").write_text(json.dumps(earlier))
    assert swapq.verify(finished).problems == []


def test_a_config_that_is_gone_is_named(finished: Path) -> None:
    (finished / "hf_quant_config.json").unlink()
    assert swapq.verify(finished).problems == ["hf_quant_config.json: recorded in swapq.json and missing"]


def test_a_shard_that_nothing_lists_is_found(finished: Path) -> None:
    shutil.copy(finished / "model-00001-of-00003.safetensors", finished / "model-extra.safetensors")
    assert swapq.verify(finished).problems == [
        "model-extra.safetensors: lies beside the shards, and some readers load every file"
    ]


def test_a_copied_file_that_is_gone_is_a_fault_and_one_that_differs_from_the_source_is_noted(
    made: Path, tmp_path: Path
) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    shutil.copytree(made / "src", src)
    for name in ("tokenizer.json", "chat_template.jinja", "README.md"):
        (src / name).write_text("of the source")
    swapq.convert_checkpoint(src, dst, tiny("nvfp4-rl"), progress=False)
    (dst / "chat_template.jinja").write_text("edited")
    (dst / "README.md").write_text("the card")
    report = swapq.verify(dst, source=src)
    assert report.problems == []
    assert report.notes == ["chat_template.jinja: differs from the source's, from which it was copied"]
    (dst / "tokenizer.json").unlink()
    assert swapq.verify(dst).problems == ["tokenizer.json: copied from the source by swapq.json and missing"]


def test_a_finished_folder_without_its_config_is_not_called_finished(made: Path, tmp_path: Path) -> None:
    swapq.convert_checkpoint(made / "src", tmp_path / "dst", tiny("nvfp4-rl"), progress=False)
    (tmp_path / "dst" / "config.json").unlink()
    with pytest.raises(swapq.SwapqError, match=r"config\.json: recorded in swapq\.json and missing; pass --overwrite"):
        swapq.convert_checkpoint(made / "src", tmp_path / "dst", tiny("nvfp4-rl"), progress=False)


# The command


def test_a_folder_or_a_source_that_is_not_there_is_a_request_that_cannot_be_carried_out(
    made: Path, tmp_path: Path
) -> None:
    for arguments in ([tmp_path / "none"], [made / "nvfp4-rl-swapq", "--source", tmp_path / "none"]):
        result = CliRunner().invoke(app, ["verify", *map(str, arguments)])
        assert result.exit_code == 2
        assert result.stderr == f"error: {tmp_path / 'none'}: no such folder\n"
        assert "sound" not in result.output


def test_a_report_of_a_folder_without_measured_errors_keeps_the_answer(made: Path, tmp_path: Path) -> None:
    folder = damaged(made, tmp_path, lambda t: None)
    with open(folder / "model.safetensors", "r+b") as shard:
        shard.truncate(1000)
    options = ["--source", str(made / "src"), "--report", str(tmp_path / "report")]
    bad = CliRunner().invoke(app, ["verify", str(folder), *options])
    assert bad.exit_code == 1
    assert "model.safetensors" in bad.stdout
    assert json.loads((tmp_path / "report" / "verify.json").read_text())["ok"] is False
    swapq.convert_checkpoint(made / "src", tmp_path / "bf16", "bf16", progress=False)
    good = CliRunner().invoke(app, ["verify", str(tmp_path / "bf16"), *options])
    assert good.exit_code == 0, good.output
    assert "no picture of errors" in good.stdout


@pytest.mark.parametrize("name", ["a[bold]b", "a[/red]"])
def test_brackets_in_a_path_are_printed_as_they_are(made: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    for arguments in (["convert", made / "src", folder, "-r", "bf16"], ["verify", folder], ["inspect", folder]):
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert result.exit_code == 0, result.output
        assert str(folder) in result.stdout


def test_the_command_has_exit_codes_and_json(made: Path, tmp_path: Path) -> None:
    good = CliRunner().invoke(app, ["verify", str(made / "nvfp4-rl-swapq"), "--source", str(made / "src"), "--json"])
    assert good.exit_code == 0, good.output
    content = json.loads(good.stdout)
    assert set(content) >= {"ok", "problems", "tensors", "totals"}
    assert content["ok"] is True
    assert content["tensors"][EXPERT]["role"] == "routed_experts"
    folder = damaged(made, tmp_path, lambda t: t.pop(EXPERT))
    bad = CliRunner().invoke(app, ["verify", str(folder)])
    assert bad.exit_code == 1
    assert "NOT sound" in bad.output
    assert EXPERT in bad.output.replace("\n", "")


def test_an_fp32_export_beside_its_bf16_source_differs_in_dtypes_only_and_says_so(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    model = AutoModelForCausalLM.from_pretrained(src, dtype=torch.float32)
    swapq.export(swapq.convert(model, "nvfp4-rl", last_layers_bf16=0), tmp_path / "dst")
    found = swapq.verify(tmp_path / "dst", source=src)
    kept = [name for name, t in every(src).items() if ".experts." not in name]
    assert len(found.problems) == len(kept)
    assert all("stored as float32, bfloat16 in the source; only the dtype differs" in p for p in found.problems)
    back = swapq.verify(tmp_path / "dst")
    assert back.ok
    other = every(tmp_path / "dst")
    other["model.norm.weight"][0] += 1
    save_file(other, tmp_path / "dst" / "model.safetensors", metadata={"format": "pt"})
    (problem,) = [p for p in swapq.verify(tmp_path / "dst", source=src).problems if "model.norm.weight" in p]
    assert problem.endswith("its values are others, too")


def test_tensors_that_a_folder_holds_rounded_are_called_rounded(tmp_path: Path) -> None:
    src = saved(tmp_path / "src", dtype=torch.float32)
    convert(src, tmp_path / "dst")
    tensors = every(tmp_path / "dst")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][1:].contiguous()
    save_file(tensors, tmp_path / "dst" / "model.safetensors", metadata={"format": "pt"})
    said = {p.partition(":")[0]: p for p in swapq.verify(tmp_path / "dst", source=src).problems}
    assert said["model.norm.weight"].endswith("the values are the source's, rounded")
    assert "its shape is [" in said["model.embed_tokens.weight"]
