"""save_pretrained, export and from_pretrained: what goes out comes back with identical logits, or is refused by name."""

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

import swapq
from swapq.convert import swapped_modules
from swapq.hf.loading import fill, headers_of
from tests.helpers.models import FAMILIES, prompts, qwen3_moe
from tests.helpers.recipes import SERVED, tiny
from tests.helpers.remote import listed_experts

EXPORTED = [f for f in FAMILIES if f != "gpt_oss"]


def exported(folder: Path, recipe: str = "nvfp4-rl", family: str = "qwen3_moe", **overrides: object) -> PreTrainedModel:
    model = swapq.convert(FAMILIES[family](), tiny(recipe), **({"last_layers_bf16": 0} | overrides))
    swapq.export(model, folder)
    return model


def edit(folder: Path, change: object) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(prompts()).logits


@pytest.mark.parametrize("recipe", ["bf16", *SERVED])
@pytest.mark.parametrize("family", EXPORTED)
def test_an_export_loads_with_identical_logits_and_saves_to_identical_bytes(
    tmp_path: Path, family: str, recipe: str
) -> None:
    model = exported(tmp_path / "a", recipe, family)
    if not swapq.recipe_of(
        model
    ).matched:  # masters train in BF16; the export, and what holds codes, is the rollout's policy
        model = swapq.convert(FAMILIES[family](), tiny(recipe), trainable=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert torch.equal(logits(loaded), logits(model))
    assert swapq.recipe_of(loaded) == swapq.recipe_of(model)
    assert swapq.digest(loaded) == swapq.digest(model) == swapq.digest(tmp_path / "a")
    loaded.save_pretrained(tmp_path / "b")
    assert swapq.digest(tmp_path / "b") == swapq.digest(tmp_path / "a")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("recipe", SERVED)
def test_save_pretrained_of_a_trainable_model_writes_masters(tmp_path: Path, recipe: str) -> None:
    plain = qwen3_moe()
    model = swapq.convert(qwen3_moe(), tiny(recipe))
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert swapq.digest(loaded) == swapq.digest(plain)
    assert torch.equal(logits(loaded), logits(plain))


@pytest.mark.parametrize("recipe", SERVED)
def test_a_codes_only_model_saves_the_same_checkpoint_as_export(tmp_path: Path, recipe: str) -> None:
    exported(tmp_path / "a", recipe)
    held = swapq.convert(qwen3_moe(), tiny(recipe), trainable=False, last_layers_bf16=0)
    held.save_pretrained(tmp_path / "b")
    assert swapq.digest(tmp_path / "b") == swapq.digest(tmp_path / "a")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "b")), logits(held))


def test_a_plain_checkpoint_is_converted_while_loading(tmp_path: Path) -> None:
    qwen3_moe().save_pretrained(tmp_path)
    config = swapq.SwapqConfig("nvfp4-rl")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert torch.equal(logits(model), logits(swapq.convert(qwen3_moe(), "nvfp4-rl")))
    assert all(p.requires_grad for p in model.parameters())
    held = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=swapq.SwapqConfig("nvfp4-rl", trainable=False)
    )
    assert torch.equal(logits(held), logits(model))
    assert not held.model.layers[0].mlp.experts.trainable


def test_the_base_model_loads_without_its_head(tmp_path: Path) -> None:
    model = exported(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(base(prompts()).last_hidden_state, model.model(prompts()).last_hidden_state)


def test_another_dtype_changes_what_is_not_quantized_only(tmp_path: Path) -> None:
    model = exported(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cpu")
    assert loaded.dtype == torch.bfloat16
    a, b = swapq.digest(loaded), swapq.digest(model)
    assert {k for k in a if a[k] != b[k]} == {k for k in a if "experts" not in k}


def test_shards_are_split_by_size_and_read_back(tmp_path: Path) -> None:
    model = swapq.convert(qwen3_moe(), "nvfp4-rl")
    swapq.export(model, tmp_path, max_shard_size=40_000)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(s.stat().st_size < 40_000 + 20_000 for s in shards)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_exporting_again_replaces_the_earlier_export(tmp_path: Path) -> None:
    model = swapq.convert(qwen3_moe(), "nvfp4-rl")
    swapq.export(model, tmp_path, max_shard_size=40_000)
    swapq.export(model, tmp_path)
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert swapq.digest(tmp_path) == swapq.digest(model)


def test_an_export_that_fails_leaves_no_checkpoint(tmp_path: Path) -> None:
    model = swapq.convert(qwen3_moe(), "nvfp4-rl", last_layers_bf16=0)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[0, 0, 0] = torch.inf
    with pytest.raises(swapq.SwapqError, match=r"model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        swapq.export(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        exported(tmp_path)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {0o644}


def test_names_dtypes_and_shapes_on_disk(tmp_path: Path) -> None:
    exported(tmp_path / "nv", "nvfp4-rl")
    exported(tmp_path / "mx", "mxfp8-rl")
    nv, mx = load_file(tmp_path / "nv" / "model.safetensors"), load_file(tmp_path / "mx" / "model.safetensors")
    prefix = "model.layers.0.mlp.experts.7"
    seen = {k.removeprefix(prefix + "."): (v.dtype, tuple(v.shape)) for k, v in nv.items() if k.startswith(prefix)}
    for projection, n, k in (("gate_proj", 32, 64), ("up_proj", 32, 64), ("down_proj", 64, 32)):
        assert seen[f"{projection}.weight"] == (torch.uint8, (n, k // 2))
        assert seen[f"{projection}.weight_scale"] == (torch.float8_e4m3fn, (n, k // 16))
        assert seen[f"{projection}.weight_scale_2"] == (torch.float32, ())
        assert mx[f"{prefix}.{projection}.weight"].dtype == torch.float8_e4m3fn
        assert (mx[f"{prefix}.{projection}.weight_scale"].dtype, mx[f"{prefix}.{projection}.weight_scale"].shape) == (
            torch.uint8,
            (n, k // 32),
        )
    assert torch.equal(nv[f"{prefix}.gate_proj.weight_scale_2"], nv[f"{prefix}.up_proj.weight_scale_2"])


def test_the_config_lists_exactly_the_quantized_weights(tmp_path: Path) -> None:
    exported(tmp_path)
    listed = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quantized"]
    stored = {
        k.removesuffix("_scale") for k in load_file(tmp_path / "model.safetensors") if k.endswith(".weight_scale")
    }
    assert set(listed) == {"nvfp4"}
    assert set(listed["nvfp4"]) == stored
    assert len(listed["nvfp4"]) == len(stored) == 2 * 8 * 3


def test_scales_stored_as_e8m0_and_as_bytes_load_alike(tmp_path: Path) -> None:
    model = exported(tmp_path, "mxfp8-rl")

    def as_e8m0(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith(".weight_scale"):
                tensors[name] = tensors[name].view(torch.float8_e8m0fnu)

    edit(tmp_path, as_e8m0)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"
FAULTS = {
    "a missing scale": (lambda t: t.pop(EXPERT + "_scale"), EXPERT + "_scale"),
    "a missing FP32 scale": (lambda t: t.pop(EXPERT + "_scale_2"), EXPERT + "_scale_2"),
    "a missing expert": (lambda t: [t.pop(k) for k in list(t) if ".experts.3.up_proj." in k], EXPERT),
    "BF16 where codes belong": (lambda t: t.update({EXPERT: torch.zeros(32, 64, dtype=torch.bfloat16)}), EXPERT),
    "another shape": (lambda t: t.update({EXPERT: t[EXPERT][:16].clone()}), EXPERT),
    "gate and up that differ": (
        lambda t: t.update({EXPERT + "_scale_2": t[EXPERT + "_scale_2"] * 2}),
        EXPERT + "_scale_2",
    ),
    "a scale of zero": (
        lambda t: t.update({k: torch.zeros(()) for k in t if k.endswith("experts.3.down_proj.weight_scale_2")}),
        "experts.3.down_proj.weight_scale_2",
    ),
    "a NaN block scale": (lambda t: t[EXPERT + "_scale"].view(torch.uint8).fill_(0x7F), EXPERT + "_scale"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    exported(tmp_path)
    change, name = FAULTS[fault]
    edit(tmp_path, change)
    with pytest.raises(swapq.SwapqError, match=name.replace(".", r"\.")):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_gate_and_up_that_are_linears_of_their_own_must_hold_one_scale(tmp_path: Path) -> None:
    """What remote code makes of experts: two modules, so no tensor of theirs is one."""
    swapq.export(swapq.convert(listed_experts(), "nvfp4-rl", last_layers_bf16=0), tmp_path)

    def filled() -> PreTrainedModel:
        model = swapq.convert(listed_experts(), "nvfp4-rl", last_layers_bf16=0)
        for module in swapped_modules(model):
            module.allocate()
        fill(model, headers_of([str(tmp_path / "model.safetensors")]))
        return model

    assert swapq.digest(filled()) == swapq.digest(tmp_path)
    edit(tmp_path, lambda t: t.update({EXPERT + "_scale_2": t[EXPERT + "_scale_2"] * 2}))
    with pytest.raises(
        swapq.SwapqError, match=r"experts\.3\.(up|gate)_proj\.weight_scale_2 differs.*share one FP32 scale"
    ):
        filled()


@pytest.mark.parametrize("recipe", ["nvfp4-rl", "mxfp8-rl"])
def test_another_config_for_a_folder_that_is_quantized_already_is_refused(tmp_path: Path, recipe: str) -> None:
    exported(tmp_path, "nvfp4-rl")
    with pytest.raises(ValueError, match="quantized already and loads without one"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=swapq.SwapqConfig(recipe))


def rewrite(folder: Path, change: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])  # type: ignore[operator]
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["quantized"]["nvfp4"].pop(), "does not list"),
        (
            lambda c: c["quantized"]["nvfp4"].append("model.layers.0.mlp.gate.weight"),
            "lists model.layers.0.mlp.gate.weight",
        ),
        (lambda c: c.pop("quantized"), "`quantized`"),
        (lambda c: c.update(version=2), "version is 2"),
        (lambda c: c.update(layout="other"), "layout is 'other'"),
        (lambda c: c.update(surprise=1), "unknown key 'surprise'"),
        (lambda c: c["recipe"].update(backwrd="x"), "backwrd"),
    ],
    ids=["one too few", "a router", "no list", "version", "layout", "unknown key", "recipe"],
)
def test_an_edited_config_is_refused(tmp_path: Path, change: object, message: str) -> None:
    exported(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(swapq.SwapqError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("recipe", ["nvfp4-rl", "mxfp8-rl"])
def test_fp32_masters_give_the_codes_of_bf16_ones_beside_tensors_that_engines_round_to_theirs(
    tmp_path: Path, recipe: str
) -> None:
    model = exported(tmp_path / "fp32", recipe)
    swapq.export(model.to(torch.bfloat16), tmp_path / "bf16")
    wide, narrow = (load_file(tmp_path / name / "model.safetensors") for name in ("fp32", "bf16"))
    assert wide.keys() == narrow.keys()
    for name, tensor in narrow.items():
        kept = wide[name].dtype == torch.float32 and not name.endswith("weight_scale_2")
        assert torch.equal((wide[name].to(torch.bfloat16) if kept else wide[name]).float(), tensor.float()), name
        assert tensor.dtype == (torch.bfloat16 if kept else wide[name].dtype)


def test_gpt_oss_is_trained_but_not_exported(tmp_path: Path) -> None:
    model = swapq.convert(FAMILIES["gpt_oss"](), "nvfp4-rl", last_layers_bf16=0)
    with pytest.raises(swapq.SwapqError, match="interleaved"):
        swapq.export(model, tmp_path)
    model.save_pretrained(tmp_path)
    assert swapq.digest(AutoModelForCausalLM.from_pretrained(tmp_path)) == swapq.digest(FAMILIES["gpt_oss"]())


def test_an_unconverted_model_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(swapq.SwapqError, match="not converted"):
        swapq.export(qwen3_moe(), tmp_path)


def test_every_parameter_of_a_loaded_model_equals_its_file(tmp_path: Path) -> None:
    exported(tmp_path, "mxfp8-rl")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    from swapq.checkpoint.tensors import checkpoint_tensors

    live, stored = dict(checkpoint_tensors(loaded)), load_file(tmp_path / "model.safetensors")
    assert live.keys() == stored.keys()
    for name, tensor in stored.items():
        assert live[name].dtype == tensor.dtype
        assert torch.equal(
            live[name].view(torch.uint8) if tensor.dim() else live[name],
            tensor.view(torch.uint8) if tensor.dim() else tensor,
        )


def test_the_config_of_an_export_is_json_that_every_reader_takes(tmp_path: Path) -> None:
    def no_constant(name: str) -> object:
        raise AssertionError(f"{name} is no JSON")

    model = exported(tmp_path, "nvfp4-rl", "nemotron_h")  # its config holds an infinity
    json.loads((tmp_path / "config.json").read_text(), parse_constant=no_constant)
    assert list(AutoConfig.from_pretrained(tmp_path).time_step_limit) == list(model.config.time_step_limit)
