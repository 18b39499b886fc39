"""Public faults 16 to 28: which module is quantized, what it is called, and what the config says."""

import json
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from compressed_tensors.utils import match_name
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import swapq
from swapq.anatomy.names import FUSED_GROUPS
from tests.helpers.families import RemoteModel, tiny
from tests.helpers.models import FAMILIES, prompts, qwen3_moe
from tests.public_faults.common import EXPERT, RECIPES, converted, edit, exported, load, logits

EXPORTED = [f for f in FAMILIES if f != "gpt_oss"]


def listed(folder: Path) -> dict[str, list[str]]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]["quantized"]


@pytest.mark.parametrize("family", EXPORTED)
@pytest.mark.parametrize("recipe", RECIPES)
def test_16_and_17_routers_and_their_like_are_never_in_the_list_and_never_lose_their_dtype(
    tmp_path: Path, family: str, recipe: str
) -> None:
    model = converted(recipe, FAMILIES[family]())
    swapq.export(model, tmp_path)
    names = {name for group in listed(tmp_path).values() for name in group}
    tensors = load_file(tmp_path / "model.safetensors")
    stored = {n.removesuffix("_scale") for n in tensors if n.endswith(".weight_scale")}
    assert names == stored
    kept = {"gate", "router", "shared_expert_gate", "embed_tokens", "lm_head", "kv_b_proj"}
    for name in tensors:
        owner = name.split(".")[-2]
        if owner in kept or "norm" in owner or owner.endswith("embeddings"):
            assert name not in names
            assert tensors[name].dtype in (torch.float32, torch.bfloat16)
    assert any(n.split(".")[-2] == "gate" for n in tensors)


def test_17_only_experts_are_in_the_set_of_an_mla_model() -> None:
    model = tiny("deepseek_v2")
    chosen = [e.name for e in swapq.plan(model, swapq.Recipe.named("nvfp4-rl", last_layers_bf16=0)) if e.quantized]
    assert chosen
    assert all(".mlp.experts." in name for name in chosen)


@pytest.mark.parametrize("role", ["router", "embedding", "lm_head", "norm", "other"])
def test_18_a_recipe_that_names_what_must_stay_is_refused_with_the_reason(role: str) -> None:
    with pytest.raises(swapq.SwapqError, match=rf"'{role}', which always stays BF16: .{{20,}}"):
        swapq.Recipe(name="mine", weights={role: "mxfp8"}, activations="mxfp8", backward="dequantized")


@pytest.mark.parametrize("recipe", RECIPES)
def test_19_and_20_every_reader_sees_the_same_set_in_our_list(tmp_path: Path, recipe: str) -> None:
    exported(tmp_path, recipe)
    names = [name for group in listed(tmp_path).values() for name in group]
    every = sorted({n for n in load_file(tmp_path / "model.safetensors") if n.endswith(".weight")})
    for name in names:  # exact names: no `re:`, no wildcard, no trailing dot, no wrapper part
        assert name in every
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz_0123456789.")
    readers = {
        "exact": lambda n: n in set(names),
        "fnmatch": lambda n: any(fnmatch(n, entry) for entry in names),
        "compressed-tensors": lambda n: any(match_name(n, entry) for entry in names),
        "substring": lambda n: any(entry in n for entry in names),
    }
    sets = {reader: [n for n in every if matches(n)] for reader, matches in readers.items()}
    assert all(found == sorted(names) for found in sets.values())


@pytest.mark.parametrize("patterns", [("k_proj",), ("q_proj", "v_proj"), ("layers.0.self_attn.q_proj",), ("v_proj.",)])
def test_22_mixed_formats_in_a_fused_group_are_refused(patterns: tuple[str, ...]) -> None:
    with pytest.raises(swapq.SwapqError, match="one layer"):
        swapq.plan(qwen3_moe(), swapq.Recipe.named("mxfp8-rl", keep_bf16=patterns))


@pytest.mark.parametrize("pattern", ["gate_proj", "experts.3", "experts.3.up_proj", "down_proj"])
def test_22_mixed_formats_in_one_layers_experts_are_refused(pattern: str) -> None:
    with pytest.raises(swapq.SwapqError, match="as a whole"):
        swapq.plan(qwen3_moe(), swapq.Recipe.named("nvfp4-rl", last_layers_bf16=0, keep_bf16=(pattern,)))


@pytest.mark.parametrize("family", EXPORTED)
def test_21_and_22_whatever_a_plan_keeps_no_group_is_mixed(family: str) -> None:
    for e in swapq.plan(FAMILIES[family](), swapq.Recipe.named("mxfp8-rl")):
        parent, _, owner = e.name.removesuffix(".weight").rpartition(".")
        group = next((g for g in FUSED_GROUPS if owner in g), None)
        if group:
            plan = swapq.plan(FAMILIES[family](), swapq.Recipe.named("mxfp8-rl"))
            assert (
                len({x.format for x in plan if x.name.removesuffix(".weight") in {f"{parent}.{n}" for n in group}}) == 1
            )


def test_21_an_unlisted_sibling_is_not_inferred(tmp_path: Path) -> None:
    exported(tmp_path)
    sibling = "model.layers.0.self_attn.q_proj.weight"

    def quantize_it(tensors: dict[str, torch.Tensor]) -> None:
        q = swapq.quantize(tensors[sibling].to(torch.bfloat16), "mxfp8")
        tensors[sibling] = q.codes
        tensors[sibling + "_scale"] = q.scales

    edit(tmp_path, quantize_it)
    assert not swapq.verify(tmp_path).ok
    edit(tmp_path, lambda tensors: tensors.pop(sibling))
    with pytest.raises(swapq.SwapqError, match="q_proj"):
        load(tmp_path)


LEFT_OVER = {
    "an expert too many": (f"{EXPERT}.up_proj.weight", "model.layers.0.mlp.experts.8.up_proj.weight"),
    "an activation scale": (f"{EXPERT}.up_proj.weight_scale_2", f"{EXPERT}.up_proj.input_scale"),
    "a bare scale": (f"{EXPERT}.up_proj.weight_scale_2", f"{EXPERT}.up_proj.scale"),
    "a fused tensor": (f"{EXPERT}.up_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"),
}


@pytest.mark.parametrize("case", LEFT_OVER)
def test_23_a_tensor_of_a_quantized_module_that_nothing_reads_is_refused_by_name(tmp_path: Path, case: str) -> None:
    like, name = LEFT_OVER[case]
    edit(exported(tmp_path), lambda tensors: tensors.update({name: tensors[like].clone()}))
    with pytest.raises(swapq.SwapqError, match=name.replace(".", r"\.")):
        load(tmp_path)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", EXPORTED)
def test_23_scales_are_scalars_and_the_keys_are_those_that_are_expected(
    tmp_path: Path, family: str, recipe: str
) -> None:
    model = converted(recipe, FAMILIES[family]())
    swapq.export(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    parts = ("weight", "weight_scale", "weight_scale_2") if recipe == "nvfp4-rl" else ("weight", "weight_scale")
    names = [name for group in listed(tmp_path).values() for name in group]
    expected = {f"{name.rpartition('.')[0]}.{part}" for name in names for part in parts}
    stems = {name.rpartition(".")[0] for name in names}
    found = {n for n in tensors if n.rpartition(".")[0] in stems and not n.endswith(".bias")}
    assert found == expected
    assert all(tensors[n].shape == () for n in tensors if n.endswith("_scale_2"))
    assert tensors.keys() == swapq.digest(model).keys()


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "qwen3_next", "qwen3_moe"])
def test_24_fused_experts_are_quantized_or_the_conversion_is_refused(name: str) -> None:
    model = tiny(name)
    swapq.convert(model, "nvfp4-rl", last_layers_bf16=0)
    found = {n: type(m).__name__ for n, m in model.named_modules() if n.endswith(".mlp.experts")}
    assert len(found) == 2
    assert set(found.values()) == {"SwapqExperts"}


def test_24_a_model_without_any_expert_is_refused() -> None:
    model = nn.Module()
    model.config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 0}
    model.lm_head = nn.Linear(64, 64)
    with pytest.raises(swapq.SwapqError, match="no expert"):
        swapq.convert(model, "nvfp4-rl")


def test_25_expert_biases_are_added_trained_and_saved(tmp_path: Path) -> None:
    for recipe in RECIPES:
        model = FAMILIES["gpt_oss"]()
        experts = model.model.layers[0].mlp.experts
        with torch.no_grad():
            experts.down_proj_bias.normal_(0, 1)
            experts.gate_up_proj_bias.normal_(0, 1)
        x, index, weights = torch.randn(9, 64).to(torch.bfloat16), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
        expected = experts(x.float(), index, weights)
        converted(recipe, model)
        y = experts(x, index, weights)
        assert (y - expected).norm() / expected.norm() < 0.15
        y.float().square().sum().backward()
        assert experts.down_proj_bias.grad.any()
        assert experts.gate_up_proj_bias.grad.any()
        model.save_pretrained(tmp_path / recipe)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / recipe).model.layers[0].mlp.experts
        assert torch.equal(again.down_proj_bias, experts.down_proj_bias)
        assert torch.equal(again.gate_up_proj_bias, experts.gate_up_proj_bias)


def test_25_biases_of_linear_experts_pass_through() -> None:
    model = RemoteModel(bias=True)
    before = {n: b.clone() for n, b in model.named_parameters() if n.endswith("bias")}
    swapq.convert(model, "nvfp4-rl", last_layers_bf16=0, trainable=False)
    tensors = dict(model.named_parameters())
    assert before
    assert all(torch.equal(tensors[n], b) for n, b in before.items())
    expert = model.model.layers[0].mlp.experts[1]
    x = torch.randn(3, 64)
    y, dequantized = expert.up_proj(x), expert.up_proj.weight.dequantize(torch.float32)
    expected = x @ dequantized.T + before["model.layers.0.mlp.experts.1.up_proj.bias"]
    assert (y - expected).norm() / expected.norm() < 0.2


STALE = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_26_no_stale_config_survives_in_an_export_or_in_saved_masters(tmp_path: Path, key: str) -> None:
    model = qwen3_moe()
    setattr(model.config, key, dict(STALE))
    converted(model=model)
    model.save_pretrained(tmp_path / "masters")
    assert key not in json.loads((tmp_path / "masters" / "config.json").read_text())
    setattr(model.config, key, dict(STALE))
    swapq.export(model, tmp_path / "export")
    content = json.loads((tmp_path / "export" / "config.json").read_text())
    assert content["quantization_config"]["quant_method"] == "swapq"
    assert "compression_config" not in content
    assert torch.equal(logits(load(tmp_path / "export")), logits(model))


def test_26_an_export_is_not_written_beside_another_tools_config(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(swapq.SwapqError, match=r"hf_quant_config\.json"):
        exported(tmp_path)


def test_27_a_file_that_holds_other_bytes_than_its_config_says_is_refused(tmp_path: Path) -> None:
    exported(tmp_path / "fp8", "mxfp8-rl")
    exported(tmp_path / "fp4")
    described = json.loads((tmp_path / "fp4" / "config.json").read_text())["quantization_config"]
    path = tmp_path / "fp8" / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"quantization_config": described}))
    report = swapq.verify(tmp_path / "fp8")
    assert not report.ok
    with pytest.raises(swapq.SwapqError, match=r"experts\.\d+\.\w+\.weight"):
        load(tmp_path / "fp8")


@pytest.mark.parametrize("rows", [1, 8, 15, 16])
def test_28_a_linear_with_few_outputs_is_kept_and_the_plan_says_why(rows: int) -> None:
    model = qwen3_moe(shared_expert_intermediate_size=64)
    for layer in model.model.layers:
        layer.self_attn.g_proj = nn.Linear(64, rows, bias=False)
    plan = swapq.plan(model, swapq.Recipe.named("mxfp8-rl", backward="dequantized"))
    entry = plan.entry_of("model.layers.0.self_attn.g_proj.weight")
    assert entry.format == ("mxfp8" if rows >= 16 else "bf16")
    if rows < 16:
        assert f"only {rows} output rows" in entry.reason
        assert f"only {rows} output rows" in str(plan)
    swapq.convert(model, "mxfp8-rl", backward="dequantized")
    assert torch.isfinite(model.model.layers[0].self_attn.g_proj(torch.randn(3, 64))).all()
    assert logits(model).shape == (*prompts().shape, 64)
