"""Layer sensitivity: the layer that costs most comes first, nothing is left changed, and the proposal is a recipe file that works."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import swapq
from swapq.cli import app
from swapq.diagnostics import measure_sensitivity
from swapq.diagnostics.sensitivity import in_bf16
from tests.helpers.models import FAMILIES, prompts, qwen3_moe
from tests.helpers.recipes import SERVED, tiny


def spoilt(layer: int = 2, layers: int = 4) -> nn.Module:
    """A model of which one layer's experts do not survive four bits: an outlier in every expert, and much weight on the rest."""
    model = qwen3_moe(num_hidden_layers=layers)
    with torch.no_grad():
        experts = model.model.layers[layer].mlp.experts
        experts.down_proj.mul_(6)
        experts.gate_up_proj[:, ::16, ::16] *= 40
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(prompts()).logits


def test_the_spoilt_layer_comes_first_and_is_proposed() -> None:
    found = measure_sensitivity(spoilt(), tiny("nvfp4-rl"), [prompts()])
    assert found.layers[0].layer == 2
    assert found.layers[0].gain > 2 * abs(found.layers[1].gain)
    assert found.kl > 0
    assert found.tokens == 3 * 11
    for x in found.layers:
        assert x.kl + x.gain == pytest.approx(found.kl)
    assert found.proposal().keep_bf16 == ("layers.2",)  # 0.15 of 4 layers is one
    assert found.proposal(0).keep_bf16 == ()
    assert len(found.kept(99)) <= 3, "a recipe that keeps every layer quantizes nothing"


def test_all_layers_in_bf16_is_the_plain_model_and_afterwards_nothing_is_changed() -> None:
    plain = spoilt()
    model = swapq.convert(spoilt(), tiny("nvfp4-rl"), last_layers_bf16=0)
    before = logits(model)
    with in_bf16(list(swapped(model))):
        assert torch.equal(logits(model), logits(plain))
    assert torch.equal(logits(model), before)
    assert not torch.equal(before, logits(plain))


def swapped(model: nn.Module) -> list[nn.Module]:
    from swapq.convert import swapped_modules

    return list(swapped_modules(model))


def test_a_layers_kl_is_that_of_a_model_converted_with_the_layer_kept() -> None:
    found = measure_sensitivity(spoilt(), tiny("nvfp4-rl"), [prompts()])
    reference = logits(spoilt())[:, :-1].double().log_softmax(-1)
    kept = swapq.convert(spoilt(), tiny("nvfp4-rl"), last_layers_bf16=0, keep_bf16=["layers.1"])
    other = logits(kept)[:, :-1].double().log_softmax(-1)
    kl = float((reference.exp() * (reference - other)).sum(-1).mean())
    assert next(x.kl for x in found.layers if x.layer == 1) == pytest.approx(kl, rel=1e-3)
    assert next(x.bytes for x in found.layers if x.layer == 1) == kept_bytes(kept) - kept_bytes(
        swapq.convert(spoilt(), tiny("nvfp4-rl"), last_layers_bf16=0)
    )


def kept_bytes(model: nn.Module) -> int:
    from swapq.convert import plan_of

    summary = plan_of(model).summary()
    wide = sum(e.bytes_before for e in plan_of(model) if not e.quantized and e.role == "routed_experts")
    return sum(e.bytes_after for e in plan_of(model) if e.quantized) + wide // 2 if summary else 0


@pytest.mark.parametrize("recipe", SERVED)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_every_recipe_and_a_family_with_shared_experts_can_be_measured(family: str, recipe: str) -> None:
    model = FAMILIES[family]()
    found = measure_sensitivity(model, tiny(recipe), [prompts()[:1]])
    assert {x.layer for x in found.layers} <= {0, 1}
    assert found.kl > 0
    assert swapq.convert(FAMILIES[family](), found.proposal(1)).training is False


def test_a_converted_model_and_prompts_of_one_token_are_refused() -> None:
    with pytest.raises(swapq.SwapqError, match="load it afresh"):
        measure_sensitivity(swapq.convert(qwen3_moe(), "bf16"), "nvfp4-rl", [prompts()])
    with pytest.raises(swapq.SwapqError, match="too short"):
        measure_sensitivity(qwen3_moe(), "nvfp4-rl", [prompts()[:, :1]])
    with pytest.raises(swapq.SwapqError, match="nothing can be ranked"):
        measure_sensitivity(qwen3_moe(), "bf16", [prompts()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sensitivity") / "src"
    spoilt().to(torch.bfloat16).save_pretrained(path)
    return path


def run(*args: object) -> object:
    return CliRunner().invoke(app, ["sensitivity", *map(str, args)])


def test_the_command_ranks_proposes_and_writes_a_recipe_that_converts(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    told = json.loads(run(folder, "--recipe", "nvfp4-rl", "--json").stdout)
    gains = [layer["gain"] for layer in told["layers"]]
    assert gains == sorted(gains, reverse=True)
    first = told["layers"][0]["pattern"]
    assert swapq.Recipe.from_dict(told["proposal"]).keep_bf16 == (first,)
    result = run(folder, "--recipe", "nvfp4-rl", "--keep", 1, "--output", mine)
    assert result.exit_code == 0, result.stderr
    assert f"proposed: keep {first} in BF16" in result.stdout
    assert "no tokenizer: 8 sequences" in result.stdout.replace("\n", " ")
    written = swapq.Recipe.resolve(mine)
    assert (written.name, written.keep_bf16, written.last_layers_bf16) == ("nvfp4-rl-tuned", (first,), 0)
    swapq.convert_checkpoint(folder, tmp_path / "out", str(mine), progress=False)
    assert swapq.verify(tmp_path / "out", source=folder).problems == []


def test_prompts_of_a_file_need_a_tokenizer_and_a_bad_recipe_is_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    result = run(folder, "--recipe", "nvfp4-rl", "--prompts", tmp_path / "prompts.txt")
    assert result.exit_code == 2
    assert "has no tokenizer" in result.stderr
    result = run(folder, "--recipe", "int4-qat")
    assert result.exit_code == 2
    assert "int4_g32" in result.stderr
    assert run(tmp_path / "nowhere", "--recipe", "nvfp4-rl").exit_code == 2


def test_prompts_are_read_with_the_models_own_tokenizer(folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from swapq.diagnostics.prompts import prompt_batches

    words = {w: i for i, w in enumerate(["[UNK]", "one", "two", "three"])}
    core = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]").save_pretrained(tmp_path)
    (tmp_path / "prompts.txt").write_text("one two three\n\ntwo one\nthree\n")
    batches, what = prompt_batches(tmp_path, 64, tmp_path / "prompts.txt")
    assert [b.tolist() for b in batches] == [[[1, 2, 3]], [[2, 1]]]
    assert what.startswith("2 prompts of")
    assert len(prompt_batches(tmp_path, 64)[0]) == 4


def test_prompts_are_cut_to_the_positions_that_the_model_has(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "short")
    config = tmp_path / "short" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 7}))
    told = json.loads(run(tmp_path / "short", "--recipe", "nvfp4-rl", "--json").stdout)
    assert told["tokens"] == 8 * 6
    assert told["prompts"].endswith("8 sequences of 7 random tokens")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--device", "nowhere"], "device is 'nowhere', which cannot be used here"),
        (["--output", "proposal.txt"], "a recipe file ends in .json"),
        (["--output", "no/such/folder/proposal.json"], "lies in no folder"),
    ],
)
def test_the_command_refuses_before_it_measures_what_it_could_not_finish(
    tmp_path: Path, options: list[str], says: str
) -> None:
    spoilt().to(torch.bfloat16).save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["sensitivity", str(tmp_path), "--recipe", "nvfp4-rl", *options])
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert result.stdout == ""


def test_prompts_that_are_no_text_are_refused_by_name(tmp_path: Path) -> None:
    spoilt().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    (tmp_path / "prompts").write_bytes(b"\xff\xfe\x00")
    options = ["--recipe", "nvfp4-rl", "--prompts", str(tmp_path / "prompts")]
    result = CliRunner().invoke(app, ["sensitivity", str(tmp_path / "model"), *options])
    assert result.exit_code == 2, result.output
    assert "is no UTF-8 text" in result.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--recipe", "nvfp4-rl", "--prompts", "nofile"], "nofile"),
        (["--recipe", "nvfp4-rl", "--prompts", "prompts.txt"], "has no tokenizer"),
        (["--recipe", "bf16"], "recipe 'bf16' quantizes nothing"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], says: str
) -> None:
    spoilt().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("one two\n")

    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", load)
    result = CliRunner().invoke(app, ["sensitivity", str(tmp_path / "model"), *options])
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
