"""The plan: what a recipe does to a model, entry by entry and in total."""

import copy
import json
import pickle
import time

import pytest
import torch
from rich.console import Console

from swapq import formats
from swapq.anatomy import Role, of_model
from swapq.errors import PlanError
from swapq.plan import Plan, PlanEntry, plan
from swapq.recipe import Recipe
from tests.helpers.families import TINY, qwen_config, qwen_headers, tiny, write_folder


@pytest.fixture(scope="module")
def qwen():
    return tiny("qwen3_moe", num_hidden_layers=8)


def test_a_plan_has_one_entry_for_each_source_tensor_in_order(qwen):
    made = plan(qwen, "nvfp4-rl")
    assert isinstance(made, Plan)
    assert len(made) == len(qwen.state_dict()) == len(list(made))
    assert [e.name for e in made] == list(qwen.state_dict())
    assert all(isinstance(e, PlanEntry) and e.reason for e in made)
    assert made.entries == tuple(made)


def test_nvfp4_rl_quantizes_the_experts_of_all_but_the_last_layers(qwen):
    made = plan(qwen, "nvfp4-rl")
    quantized = {e.name for e in made if e.quantized}
    assert quantized == {f"model.layers.{i}.mlp.experts.{p}" for i in range(7) for p in ("gate_up_proj", "down_proj")}
    kept = made.entry_of("model.layers.7.mlp.experts.down_proj")
    assert (kept.format, kept.tensors, kept.bytes_after) == ("bf16", (), kept.bytes_before)
    assert kept.reason == "last 1 of 8 layers (last_layers_bf16 = 0.15)"


def test_mxfp8_rl_quantizes_every_linear_and_nothing_else(qwen):
    made = plan(qwen, "mxfp8-rl")
    by_role = {role: {e.format for e in made if e.role is role} for role in {e.role for e in made}}
    assert by_role == {
        Role.attention: {"mxfp8"},
        Role.routed_experts: {"mxfp8"},
        **{role: {"bf16"} for role in (Role.norm, Role.router, Role.embedding, Role.lm_head)},
    }


def test_bf16_keeps_everything_and_changes_no_size(qwen):
    made = plan(qwen, "bf16")
    summary = made.summary()
    assert made.quantized == {}
    assert summary["bytes_before"] == summary["bytes_after"]
    assert summary["bits_per_parameter"] == 16


def test_shared_experts_stay_bf16_under_nvfp4_rl_and_become_mxfp8_under_mxfp8_rl():
    model = tiny("qwen2_moe")
    for recipe, expected in (("nvfp4-rl", "bf16"), ("mxfp8-rl", "mxfp8")):
        made = plan(model, recipe)
        assert made.format_of("model.layers.0.mlp.shared_expert.up_proj.weight") == expected
        assert made.format_of("model.layers.0.mlp.shared_expert_gate.weight") == "bf16"


def test_quantized_names_are_in_numeric_order():
    layers = 11
    made = plan(tiny("qwen3_moe", num_hidden_layers=layers, num_experts=12), "nvfp4-rl")
    places = [(int(n.split(".")[2]), int(n.split(".")[5])) for n in made.quantized]
    assert places == sorted(places)
    assert len(made.quantized) == 9 * 12 * 3


@pytest.mark.parametrize("recipe", ["mxfp8-rl", "nvfp4-rl"])
def test_bytes_after_are_those_of_a_real_quantization(qwen, recipe):
    made = plan(qwen, recipe)
    state = qwen.state_dict()
    for entry in made:
        if not entry.quantized:
            assert entry.bytes_after == entry.bytes_before == state[entry.name].nbytes
            continue
        fmt = formats.get(entry.format)
        stack = state[entry.name].reshape(-1, *state[entry.name].shape[-2:])
        halves = [half for matrix in stack for half in (matrix.chunk(2) if "gate_up" in entry.name else (matrix,))]
        assert len(entry.tensors) == len(halves)
        parts = [fmt.quantize(half, scope=fmt.default_scope, axis=-1) for half in halves]
        assert entry.bytes_after == sum(t.nbytes for p in parts for t in p if t is not None)


@pytest.mark.parametrize(("recipe", "bits"), [("mxfp8-rl", 8.25), ("nvfp4-rl", 4.5)])
def test_bits_per_parameter_of_large_experts_are_the_formats(tmp_path, recipe, bits):
    sizes = {"layers": 2, "experts": 2, "hidden": 512, "inner": 512}
    folder = write_folder(
        tmp_path, qwen_config(num_experts=2, hidden_size=512, moe_intermediate_size=512), qwen_headers(**sizes)
    )
    rows = plan(folder, recipe).summary()["roles"]["routed_experts"]
    (row,) = rows.values()
    assert 8 * row["bytes_after"] / row["parameters"] == pytest.approx(bits, abs=0.001)


def test_the_summary_adds_up(qwen):
    made = plan(qwen, "nvfp4-rl")
    s = made.summary()
    rows = [row for by_format in s["roles"].values() for row in by_format.values()]
    for key in ("tensors", "parameters", "bytes_before", "bytes_after"):
        assert sum(row[key] for row in rows) == s[key]
    assert s["quantized"] + s["kept"] + s["dropped"] == s["tensors"]
    assert s["bits_per_parameter"] == 8 * s["bytes_after"] / s["parameters"]
    assert s["exceptions"] == [
        {"role": "routed_experts", "reason": "last 1 of 8 layers (last_layers_bf16 = 0.15)", "tensors": 2}
    ]
    assert s["recipe_id"] == Recipe.named("nvfp4-rl").id
    json.dumps(made.to_dict())


def test_the_printed_table_groups_alike_tensors_and_ends_in_totals(qwen):
    said = str(plan(qwen, "nvfp4-rl"))
    assert "model.layers.[0-6].mlp.experts.gate_up_proj" in said
    assert "model.layers.7.mlp.experts.gate_up_proj" in said
    assert "bits per parameter" in said
    assert "exception: 2 routed_experts tensors stay: last 1 of 8 layers" in said
    assert len(said.splitlines()) < 40
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(plan(qwen, "nvfp4-rl"))
    assert max(len(line.rstrip()) for line in console.export_text().splitlines()) <= 80


def test_a_plan_survives_copies_and_pickle(qwen):
    made = plan(qwen, "nvfp4-rl")
    assert copy.deepcopy(made).quantized == made.quantized
    assert pickle.loads(pickle.dumps(made)).summary() == made.summary()


@pytest.mark.parametrize("recipe", ["mxfp8-rl", "nvfp4-rl"])
def test_a_converted_model_has_the_plan_it_had_before(recipe):
    from swapq.convert import convert

    model = tiny("mixtral")
    before = plan(model, recipe)
    after = plan(convert(model, recipe), recipe)
    assert after.entries == before.entries
    assert after.anatomy.experts == before.anatomy.experts


def test_a_model_that_holds_codes_says_that_it_is_converted_already():
    from swapq.convert import convert

    with pytest.raises(PlanError, match=r"this model is already converted by swapq"):
        plan(convert(tiny("qwen3_moe"), "nvfp4-rl", trainable=False), "nvfp4-rl")


def test_a_plan_of_an_anatomy_equals_the_plan_of_its_model(qwen):
    assert plan(of_model(qwen), "mxfp8-rl").entries == plan(qwen, "mxfp8-rl").entries


def test_gate_and_up_share_one_entry_where_the_source_fuses_them(qwen):
    entry = plan(qwen, "nvfp4-rl").entry_of("model.layers.0.mlp.experts.gate_up_proj")
    assert entry.tensors[:2] == (
        "model.layers.0.mlp.experts.0.gate_proj.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
    )
    assert len(entry.tensors) == 8


def test_unknown_source_names_and_things_that_are_no_model_are_refused(qwen):
    made = plan(qwen, "bf16")
    with pytest.raises(PlanError, match=r"no source tensor 'nope'"):
        made.format_of("nope")
    with pytest.raises(PlanError, match="got int"):
        plan(3, "bf16")


@pytest.mark.parametrize("name", TINY)
def test_every_family_can_be_planned_with_every_recipe(name):
    with torch.device("meta"):
        model = tiny(name)
    for recipe in ("bf16", Recipe.named("mxfp8-rl", backward="dequantized"), "nvfp4-rl"):
        made = plan(model, recipe)
        assert bool(made.quantized) == (recipe != "bf16")
        assert not any(
            e.quantized for e in made if e.role in (Role.router, Role.norm, Role.embedding, Role.lm_head, Role.other)
        )


def test_a_dense_model_can_be_planned_for_mxfp8_and_not_for_nvfp4_experts():
    model = tiny("llama")
    assert all(e.format == "mxfp8" for e in plan(model, "mxfp8-rl") if e.role in (Role.attention, Role.dense_mlp))
    with pytest.raises(PlanError, match="matched no expert in this dense model"):
        plan(model, "nvfp4-rl")


def test_a_plan_of_671_billion_parameters_takes_seconds(tmp_path):
    """DeepSeek-V3's real tensor list: 61 layers of 256 experts and one next-token layer, block-FP8, 91 thousand tensors in 163 shards."""
    from tests.test_anatomy_checkpoint import DEEPSEEK, FP8, deepseek_headers

    tensors = deepseek_headers(layers=61, experts=256, fp8=True)
    config = {**DEEPSEEK, "num_hidden_layers": 61, "n_routed_experts": 256, "quantization_config": FP8}
    folder = write_folder(tmp_path, config, tensors, shards=163)
    assert len(tensors) > 90_000
    start = time.process_time()
    made = plan(folder, Recipe.named("nvfp4-rl", keep_bf16=["layers.3.mlp", "o_proj", "layers.*.self_attn"]))
    text = str(made)
    seconds = time.process_time() - start
    assert seconds < 20, f"{seconds:.1f} s of processor time"
    assert len(made.quantized) == (60 - 9 - 1) * 256 * 3
    assert len(text.splitlines()) < 150
    assert made.anatomy.num_layers == 61


def test_what_stays_agrees_with_its_role_in_number():
    reasons = {e.role.value: e.reason for e in plan(tiny("qwen2_moe"), "nvfp4-rl") if " BF16 in nvfp4-rl" in e.reason}
    assert reasons["attention"] == "attention stays BF16 in nvfp4-rl"
    assert reasons["shared_experts"] == "shared_experts stay BF16 in nvfp4-rl"
