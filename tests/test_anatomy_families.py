"""Every family of transformers: the live model and the files that ``save_pretrained`` writes of it get the same roles and Hub names."""

import pytest
import torch
from torch import nn

from swapq.anatomy import FAMILIES, Role, of_checkpoint, of_model
from swapq.errors import AnatomyError
from swapq.plan import plan
from swapq.recipe import Recipe
from tests.helpers.families import EXPERTS, HIDDEN, INNER, TINY, TINY_VISION, save, tiny

ALL = [*TINY, *TINY_VISION]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Each tiny model with the folder it was saved to, made once."""
    made = {}

    def get(name):
        if name not in made:
            torch.manual_seed(0)
            model = tiny(name)
            made[name] = model, save(model, tmp_path_factory.mktemp("family"))
        return made[name]

    return get


@pytest.mark.parametrize("name", ALL)
def test_live_model_and_saved_files_agree_on_roles_names_and_formats(models, name):
    model, folder = models(name)
    live, disk = of_model(model), of_checkpoint(folder)
    assert live.num_layers == disk.num_layers
    assert [(e.hub_prefix, e.num_experts, e.hidden, e.intermediate, e.gated) for e in live.experts] == [
        (e.hub_prefix, e.num_experts, e.hidden, e.intermediate, e.gated) for e in disk.experts
    ]
    assert [e.prefix for e in live.experts] == [e.prefix for e in disk.experts]
    others = {live.hub_name(t.name): t.role for t in live.tensors if t.expert is None}
    assert others == {t.name: t.role for t in disk.tensors if t.expert is None}
    assert all(disk.hub_name(t.name) == t.name for t in disk.tensors if t.expert is None)
    for recipe in (Recipe.named("mxfp8-rl", backward="dequantized"), "nvfp4-rl"):
        a, b = plan(live, recipe), plan(disk, recipe)
        assert list(a.quantized.items()) == list(b.quantized.items())
        assert a.summary()["bytes_after"] == b.summary()["bytes_after"]
        assert a.summary()["parameters"] == b.summary()["parameters"] == sum(t.shape.numel() for t in _unique(model))


def _unique(model):
    seen, names = set(), set(model.state_dict())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in names and id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


@pytest.mark.parametrize("name", ALL)
def test_every_parameter_of_the_experts_and_only_those_has_the_routed_role(models, name):
    model, _ = models(name)
    anatomy = of_model(model)
    inside = {
        f"{layout.prefix}.{p}"
        for layout in anatomy.experts
        for p, _ in model.get_submodule(layout.prefix).named_parameters()
    }
    assert inside
    assert {t.name for t in anatomy.tensors if t.role is Role.routed_experts} == inside


@pytest.mark.parametrize("name", ALL)
def test_only_experts_and_plain_linears_can_be_quantized(models, name):
    model, _ = models(name)
    for t in of_model(model).tensors:
        if t.linear and t.expert is None:
            owner = model.get_submodule(t.name.rpartition(".")[0])
            assert isinstance(owner, nn.Linear)
            assert t.role in (Role.attention, Role.dense_mlp, Role.shared_experts)
        elif t.linear:
            assert t.role is Role.routed_experts
            assert len(t.shape) == 3


@pytest.mark.parametrize("name", ALL)
def test_routers_are_found_and_never_linear(models, name):
    model, _ = models(name)
    anatomy = of_model(model)
    routers = {t.name for t in anatomy.tensors if t.role is Role.router}
    for layout in anatomy.experts:
        block = layout.prefix.rpartition(".")[0]
        assert any(r.startswith((f"{block}.gate.", f"{block}.router.")) for r in routers)
    gates = {n for n, p in model.named_parameters() if n.endswith("shared_expert_gate.weight") and p.shape[0] == 1}
    assert gates <= routers
    assert not any(t.linear for t in anatomy.tensors if t.role is Role.router)


@pytest.mark.parametrize("name", ALL)
def test_hub_weights_are_the_experts_own_matrices(models, name):
    """The names map to the right slice of the fused tensor: what ``save_pretrained`` wrote under that name is the oracle."""
    from safetensors import safe_open

    model, folder = models(name)
    anatomy = of_model(model)
    with safe_open(folder / "model.safetensors", "pt") as file:
        on_disk = set(file.keys())
        layout = anatomy.experts[-1]
        names = {(e, p): layout.hub_weight(e, p) for e in range(EXPERTS) for p in layout.projections}
        if not set(names.values()) <= on_disk:
            assert FAMILIES[name.partition("/")[0]].transposed or name == "qwen3_vl_moe", (
                "a family that is only fused on the Hub"
            )
            return
        up = model.get_parameter(f"{layout.prefix}.{layout.gate_up_name or layout.up_name}")
        down = model.get_parameter(f"{layout.prefix}.{layout.down_name}")
        for (e, p), hub in names.items():
            start = layout.intermediate if p == "up" and layout.gated else 0
            mine = down[e] if p == "down" else up[e, start : start + layout.intermediate]
            assert tuple(mine.shape) == layout.matrix(p)
            assert torch.equal(file.get_tensor(hub), mine)


def test_mixtral_and_minimax_experts_have_the_hubs_names(models):
    for name in ("mixtral", "minimax", "minimax_m2"):
        layout = of_model(models(name)[0]).experts[1]
        assert layout.prefix == "model.layers.1.mlp.experts"
        assert layout.hub_weight(3, "gate") == "model.layers.1.block_sparse_moe.experts.3.w1.weight"
        assert layout.hub_weight(3, "up") == "model.layers.1.block_sparse_moe.experts.3.w3.weight"
        assert layout.hub_weight(3, "down") == "model.layers.1.block_sparse_moe.experts.3.w2.weight"


def test_gpt_oss_is_transposed_interleaved_and_biased(models):
    model, _ = models("gpt_oss")
    anatomy = of_model(model)
    layout = anatomy.experts[0]
    assert (layout.transposed, layout.interleaved, layout.has_bias, layout.gated) == (True, True, True, True)
    assert (layout.hidden, layout.intermediate) == (HIDDEN, INNER)
    slots = {t.name.rpartition(".")[2]: t for t in anatomy.tensors if t.layer == 0 and t.expert is not None}
    assert slots["gate_up_proj"].expert.transposed
    assert slots["gate_up_proj"].expert.interleaved
    assert slots["down_proj"].expert.transposed
    assert not slots["down_proj"].expert.interleaved
    assert not slots["gate_up_proj_bias"].linear
    assert layout.hub_weight(0, "up") == "model.layers.0.mlp.experts.0.up_proj.weight"
    assert layout.hub_bias(0, "down") == "model.layers.0.mlp.experts.0.down_proj.bias"


@pytest.mark.parametrize(("name", "hidden"), [("nemotron_h", 64), ("nemotron_h/latent", 32)])
def test_nemotron_h_has_no_gate_and_may_have_a_latent_size(models, name, hidden):
    anatomy = of_model(models(name)[0])
    (layout,) = anatomy.experts
    assert (layout.gated, layout.layer, layout.hidden, layout.up_name, layout.gate_up_name) == (
        False,
        2,
        hidden,
        "up_proj",
        None,
    )
    assert layout.projections == ("up", "down")
    assert layout.hub_weight(1, "up") == "backbone.layers.2.mixer.experts.1.up_proj.weight"
    with pytest.raises(AnatomyError, match="has no gate"):
        layout.hub_weight(1, "gate")
    with pytest.raises(AnatomyError, match="no expert 4"):
        layout.hub_weight(4, "up")
    roles = {t.name: t.role for t in anatomy.tensors}
    assert roles["model.layers.0.mixer.in_proj.weight"] is Role.other
    assert roles["model.layers.1.mixer.q_proj.weight"] is Role.attention
    assert roles["model.layers.2.mixer.shared_experts.up_proj.weight"] is Role.shared_experts
    assert roles["model.layers.3.mixer.up_proj.weight"] is Role.dense_mlp
    assert anatomy.num_layers == 4


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm4_moe"])
def test_deepseek_like_models_have_a_dense_layer_and_shared_experts(models, name):
    roles = {t.name: t.role for t in of_model(models(name)[0]).tensors}
    assert roles["model.layers.0.mlp.gate_proj.weight"] is Role.dense_mlp
    assert roles["model.layers.1.mlp.shared_experts.gate_proj.weight"] is Role.shared_experts
    assert roles["model.layers.1.mlp.gate.weight"] is Role.router


def test_the_correction_bias_and_kv_b_proj_say_what_they_are(models):
    notes = {t.name: t.note for t in of_model(models("deepseek_v3")[0]).tensors}
    assert notes["model.layers.1.mlp.gate.e_score_correction_bias"] == "correction bias"
    assert notes["model.layers.1.self_attn.kv_b_proj.weight"] == "MLA kv_b_proj"
    moved = {t.name: (t.role, t.note) for t in of_model(models("minimax_m2")[0]).tensors}
    assert moved["model.layers.0.mlp.e_score_correction_bias"] == (Role.router, "correction bias")


@pytest.mark.parametrize("name", TINY_VISION)
def test_the_vision_tower_is_noted_and_the_prefix_kept(models, name):
    model, _ = models(name)
    anatomy = of_model(model)
    tower = [t for t in anatomy.tensors if t.name.startswith("model.visual.")]
    assert tower
    assert {(t.note, t.linear) for t in tower} == {("vision tower", False)}
    assert anatomy.experts[-1].hub_weight(0, "gate") == "model.language_model.layers.1.mlp.experts.0.gate_proj.weight"
    assert not any(
        ".visual." in name for name in plan(anatomy, Recipe.named("mxfp8-rl", backward="dequantized")).quantized
    )


def test_qwen3_vl_files_are_turned_as_the_config_says(models):
    model, folder = models("qwen3_vl_moe")
    live, disk = of_model(model), of_checkpoint(folder)
    shapes = {t.name: t.shape for t in disk.tensors}
    for layout in disk.experts:
        stored = shapes[f"{layout.hub_prefix}.gate_up_proj"]
        assert layout.transposed == (stored == (EXPERTS, 96, 2 * INNER))
        assert (layout.hidden, layout.intermediate) == (96, INNER)
    assert not live.experts[0].transposed


def test_tied_embeddings_appear_once():
    tied = of_model(tiny("qwen3_moe", tie_word_embeddings=True))
    assert [t.name for t in tied.tensors if t.role in (Role.embedding, Role.lm_head)] == ["model.embed_tokens.weight"]


def test_the_meta_device_is_enough():
    with torch.device("meta"):
        model = tiny("qwen3_moe")
    assert len(of_model(model).experts) == 2


def test_wide_masters_keep_their_dtype_and_name():
    infos = of_model(tiny("qwen3_moe", dtype=torch.float32)).tensors
    assert {t.dtype for t in infos} == {torch.float32}


def test_an_experts_module_that_contradicts_its_family_is_refused():
    model = tiny("qwen3_moe")
    model.model.layers[1].mlp.experts.is_transposed = True
    with pytest.raises(AnatomyError, match=r"layers\.1\.mlp\.experts .*is_transposed = True"):
        of_model(model)


@pytest.mark.parametrize("model_type", ["jetmoe", "granitemoe", "phimoe"])
def test_an_unknown_family_with_experts_is_refused_by_name(model_type):
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "num_local_experts": 4,
    }
    config = AutoConfig.for_model(
        model_type, **small, num_attention_heads=4, num_key_value_heads=4, bos_token_id=0, eos_token_id=1
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(AnatomyError, match=f"model_type '{model_type}' has routed experts"):
        of_model(model)


def test_a_family_is_never_guessed_from_shapes():
    model = tiny("qwen3_moe")
    model.config.model_type = "qwen9_moe"
    with pytest.raises(AnatomyError, match=r"'qwen9_moe'.*never guesses"):
        of_model(model)
