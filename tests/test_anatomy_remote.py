"""Remote code: a ``ModuleList`` of per-expert linears says itself what it is; anything else of an unknown family is refused."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from swapq.anatomy import Role, of_checkpoint, of_model
from swapq.errors import AnatomyError, PlanError
from swapq.plan import plan
from tests.helpers.families import RemoteModel, qwen_config, qwen_headers, tiny, write_folder


@pytest.mark.parametrize(
    ("names", "gated"),
    [(("gate_proj", "up_proj", "down_proj"), True), (("w1", "w3", "w2"), True), (("up_proj", "down_proj"), False)],
    ids=["gate_up_down", "w1_w3_w2", "no gate"],
)
def test_a_module_list_of_linears_is_understood(names, gated):
    anatomy = of_model(RemoteModel(names))
    assert anatomy.family == "module_list"
    layout = anatomy.experts[1]
    assert (layout.prefix, layout.hub_prefix) == ("model.layers.1.mlp.experts",) * 2
    assert (layout.kind, layout.num_experts, layout.hidden, layout.intermediate, layout.gated) == (
        "modulelist",
        4,
        64,
        32,
        gated,
    )
    assert layout.hub_weight(2, "down") == f"model.layers.1.mlp.experts.2.{names[-1]}.weight"
    made = plan(anatomy, "nvfp4-rl")
    assert len(made.quantized) == 2 * 4 * len(names)
    assert made.format_of("model.layers.0.mlp.gate.weight") == "bf16"


def test_biases_of_a_module_list_are_kept():
    anatomy = of_model(RemoteModel(bias=True))
    assert anatomy.experts[0].has_bias
    biases = [t for t in anatomy.tensors if t.name.endswith(".bias")]
    assert biases
    assert not any(t.linear for t in biases)


def test_a_known_family_in_remote_code_keeps_its_hub_names():
    """DeepSeek's own modeling file has a ModuleList; the names are the Hub's already."""
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "n_routed_experts": 4,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
    }
    anatomy = of_model(RemoteModel(config=config))
    assert anatomy.family == "deepseek_v3"
    assert anatomy.experts[0].kind == "modulelist"
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in plan(anatomy, "nvfp4-rl").quantized


def test_experts_that_are_no_linears_are_refused():
    model = RemoteModel()
    odd = nn.Module()
    odd.weight = nn.Parameter(torch.zeros(32, 64))
    model.model.layers[1].mlp.experts[2].up_proj = odd
    with pytest.raises(AnatomyError, match="somebodys_moe"):
        of_model(model)


def test_experts_with_unknown_projection_names_are_refused():
    with pytest.raises(AnatomyError, match=r"somebodys_moe.*experts\.0\.wi"):
        of_model(RemoteModel(("wi", "wo")))


@pytest.mark.parametrize("where", ["expert_list", "moe_experts", "local_experts"])
def test_experts_under_an_unknown_name_are_refused_and_not_taken_for_a_dense_mlp(where):
    model = RemoteModel(config={"model_type": "x", "num_hidden_layers": 2})
    for layer in model.model.layers:
        layer.mlp.add_module(where, layer.mlp.experts)
        del layer.mlp.experts
    with pytest.raises(AnatomyError, match=where):
        of_model(model)


def test_a_config_that_speaks_of_experts_that_nobody_finds_is_refused():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = {"model_type": "x", "num_hidden_layers": 1, "num_local_experts": 8}
            self.layers = nn.ModuleList([nn.ModuleDict({"mlp": nn.ModuleDict({"up_proj": nn.Linear(32, 32)})})])

    with pytest.raises(AnatomyError, match="config says 8 experts"):
        of_model(Hidden())


def test_a_module_list_without_a_config_is_understood():
    model = RemoteModel(config={})
    assert of_model(model).num_layers == 2
    assert len(of_model(model).experts) == 2


def test_files_of_an_unknown_family_need_remote_code_to_be_read_as_a_module_list(tmp_path):
    config = qwen_config(model_type="somebodys_moe")
    with pytest.raises(AnatomyError, match="'somebodys_moe'"):
        of_checkpoint(write_folder(tmp_path / "a", config, qwen_headers()))
    remote = {**config, "auto_map": {"AutoModelForCausalLM": "modeling_somebody.Model"}}
    anatomy = of_checkpoint(write_folder(tmp_path / "b", remote, qwen_headers()))
    assert (anatomy.family, len(anatomy.experts)) == ("module_list", 2)


def test_a_dense_model_has_roles_and_no_experts():
    anatomy = of_model(tiny("llama"))
    assert (anatomy.family, anatomy.experts) == ("dense", ())
    roles = {t.name: t.role for t in anatomy.tensors if t.layer == 0}
    assert roles["model.layers.0.mlp.gate_proj.weight"] is Role.dense_mlp
    assert roles["model.layers.0.self_attn.o_proj.weight"] is Role.attention


def test_attention_called_to_q_to_k_to_v_is_attention_all_three():
    model = RemoteModel()
    for layer in model.model.layers:
        layer.attn = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("to_q", "to_k", "to_v", "to_out")})
    formats = {e.name: e.format for e in plan(model, "mxfp8-rl") if ".attn." in e.name and e.name.endswith("weight")}
    assert set(formats.values()) == {"mxfp8"}
    assert len(formats) == 8


def test_a_two_dimensional_weight_that_is_no_linear_is_never_quantized():
    """GPT-2's Conv1D keeps [in, out]: quantizing its rows would cut the wrong axis."""
    model = RemoteModel()
    conv = nn.Module()
    conv.weight = nn.Parameter(torch.zeros(64, 64))
    model.model.layers[0].self_attn = nn.ModuleDict({"o_proj": conv})
    entry = plan(model, "mxfp8-rl").entry_of("model.layers.0.self_attn.o_proj.weight")
    assert (entry.format, entry.role) == ("bf16", Role.attention)


def test_a_layout_that_a_module_carries_is_taken_at_its_word():
    model = tiny("qwen3_moe")
    (first, second) = of_model(model).experts
    model.config.model_type = "somebodys_moe"
    for layer, layout in zip(model.model.layers, (first, second), strict=True):
        layer.mlp.experts.swapq_layout = replace(layout, hub_gate="wg")
    anatomy = of_model(model)
    assert anatomy.experts[0].hub_weight(0, "gate") == "model.layers.0.mlp.experts.0.wg.weight"
    assert (
        "model.layers.1.mlp.experts.3.wg.weight" in plan(anatomy, {"name": "nvfp4-rl", "last_layers_bf16": 0}).quantized
    )


def test_a_wrapper_in_front_of_the_model_changes_live_names_only():
    model = tiny("qwen3_moe")
    for layer, layout in zip(model.model.layers, of_model(model).experts, strict=True):
        layer.mlp.experts.swapq_layout = layout
    wrapped = nn.Module()
    wrapped.module, wrapped.config = model, model.config
    anatomy = of_model(wrapped)
    assert anatomy.experts[0].prefix == "module.model.layers.0.mlp.experts"
    assert anatomy.experts[0].hub_weight(0, "up") == "model.layers.0.mlp.experts.0.up_proj.weight"


@pytest.mark.parametrize("wrap", ["module", "_orig_mod", "_fsdp_wrapped_module"])
def test_hub_names_do_not_know_about_wrappers(wrap):
    model = tiny("mixtral")
    wrapped = nn.Module()
    wrapped.config = model.config
    wrapped.add_module(wrap, model)
    assert plan(wrapped, "nvfp4-rl").quantized == plan(model, "nvfp4-rl").quantized
    assert (
        of_model(wrapped).hub_name(f"{wrap}.model.layers.0.mlp.gate.weight")
        == "model.layers.0.block_sparse_moe.gate.weight"
    )


def test_a_model_with_adapters_is_refused_with_the_order_that_works():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny("qwen3_moe"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(PlanError, match=r"belongs to an adapter; convert the model first"):
        plan(model, "mxfp8-rl")


def test_a_live_model_that_is_quantized_already_is_refused():
    model = tiny("qwen3_moe")
    linear = model.model.layers[0].self_attn.q_proj
    linear.weight = nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(PlanError, match=r"q_proj\.weight.*float8_e4m3fn"):
        plan(model, "nvfp4-rl")


def test_a_live_model_with_torchao_tensors_is_refused():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = tiny("qwen3_moe")
    quantize_(model, Int8WeightOnlyConfig())
    with pytest.raises(PlanError, match=r"already quantized.*torchao"):
        plan(model, "mxfp8-rl")
