"""Checkpoints by their headers: next-token layers, FP8 sources, quantized ones, and every disagreement with the config."""

import json

import pytest
import torch

from swapq.anatomy import Role, of_checkpoint
from swapq.errors import AnatomyError, CheckpointError, PlanError
from swapq.plan import plan
from tests.helpers.families import qwen_config, qwen_headers, save, tiny, write_folder

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "n_routed_experts": 4,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def deepseek_headers(*, layers=3, mtp=True, experts=4, hidden=128, inner=128, fp8=False):
    """DeepSeek-V3's own spelling, next-token layer at index ``layers`` included."""
    out = {"model.embed_tokens.weight": ("BF16", (64, hidden)), "model.norm.weight": ("BF16", (hidden,))}

    def linear(name, n, k):
        out[f"{name}.weight"] = ("F8_E4M3" if fp8 else "BF16", (n, k))
        if fp8:
            out[f"{name}.weight_scale_inv"] = ("F32", (-(-n // 128), -(-k // 128)))

    for i in range(layers + mtp):
        stem = f"model.layers.{i}"
        out[f"{stem}.input_layernorm.weight"] = ("BF16", (hidden,))
        for name, n, k in (
            ("q_a_proj", 64, hidden),
            ("kv_a_proj_with_mqa", 64, hidden),
            ("q_b_proj", 192, 64),
            ("kv_b_proj", 192, 64),
        ):
            linear(f"{stem}.self_attn.{name}", n, k)
        linear(f"{stem}.self_attn.o_proj", hidden, 192)
        if i == 0:
            for name in ("gate_proj", "up_proj"):
                linear(f"{stem}.mlp.{name}", 256, hidden)
            linear(f"{stem}.mlp.down_proj", hidden, 256)
            continue
        out[f"{stem}.mlp.gate.weight"] = ("BF16", (experts, hidden))
        out[f"{stem}.mlp.gate.e_score_correction_bias"] = ("F32", (experts,))
        for place in [f"experts.{e}" for e in range(experts)] + ["shared_experts"]:
            for name in ("gate_proj", "up_proj"):
                linear(f"{stem}.mlp.{place}.{name}", inner, hidden)
            linear(f"{stem}.mlp.{place}.down_proj", hidden, inner)
    if mtp:
        stem = f"model.layers.{layers}"
        linear(f"{stem}.eh_proj", hidden, 2 * hidden)
        for name, shape in (("embed_tokens", (64, hidden)), ("enorm", (hidden,)), ("hnorm", (hidden,))):
            out[f"{stem}.{name}.weight"] = ("BF16", shape)
        for name, shape in (("head", (64, hidden)), ("norm", (hidden,))):
            out[f"{stem}.shared_head.{name}.weight"] = ("BF16", shape)
    out["lm_head.weight"] = ("BF16", (64, hidden))
    return out


def test_deepseek_next_token_layers_stay_as_they_are_in_every_recipe(tmp_path):
    anatomy = of_checkpoint(write_folder(tmp_path, DEEPSEEK, deepseek_headers(), shards=3))
    assert anatomy.num_layers == 3
    assert [e.layer for e in anatomy.experts] == [1, 2]
    notes = {t.name: t.note for t in anatomy.tensors}
    assert notes["model.layers.3.mlp.experts.0.gate_proj.weight"] == "next-token layer"
    assert notes["model.layers.3.eh_proj.weight"] == "next-token layer"
    for recipe in ("mxfp8-rl", "nvfp4-rl"):
        made = plan(anatomy, recipe)
        assert {e.format for e in made if ".layers.3." in e.name} == {"bf16"}
        assert not any(".layers.3." in name for name in made.quantized)
        assert any(".layers.1." in name for name in made.quantized)


def test_kv_b_proj_stays_bf16_under_mxfp8_while_its_neighbours_do_not(tmp_path):
    made = plan(write_folder(tmp_path, DEEPSEEK, deepseek_headers()), "mxfp8-rl")
    kept = made.entry_of("model.layers.1.self_attn.kv_b_proj.weight")
    assert (kept.format, kept.tensors) == ("bf16", ())
    assert "kv_b_proj" in kept.reason
    assert made.format_of("model.layers.1.self_attn.q_b_proj.weight") == "mxfp8"
    assert made.format_of("model.layers.0.mlp.gate_proj.weight") == "mxfp8"
    assert made.format_of("model.layers.1.mlp.shared_experts.up_proj.weight") == "mxfp8"
    assert made.format_of("model.layers.1.mlp.gate.weight") == "bf16"


@pytest.mark.parametrize("prefix", ["mtp", "model.mtp"])
def test_next_token_modules_with_a_numbering_of_their_own_are_no_decoder_layers(tmp_path, prefix):
    tensors = qwen_headers()
    tensors |= {f"{prefix}.fc.weight": ("BF16", (64, 128)), f"{prefix}.pre_fc_norm_embedding.weight": ("BF16", (64,))}
    tensors |= {
        k.replace("model.layers.0", f"{prefix}.layers.0"): v
        for k, v in qwen_headers(layers=1).items()
        if ".layers." in k
    }
    anatomy = of_checkpoint(write_folder(tmp_path, qwen_config(), tensors))
    assert anatomy.num_layers == 2
    assert [e.layer for e in anatomy.experts] == [0, 1]
    mine = [t for t in anatomy.tensors if t.name.startswith(prefix)]
    assert {t.note for t in mine} == {"next-token layer"}
    assert {t.layer for t in mine} == {None}
    made = plan(anatomy, "mxfp8-rl")
    assert not any("mtp" in name for name in made.quantized)


def test_a_block_fp8_source_is_read_and_its_scales_dissolve(tmp_path):
    folder = write_folder(tmp_path, {**DEEPSEEK, "quantization_config": FP8}, deepseek_headers(fp8=True), shards=2)
    anatomy = of_checkpoint(folder)
    infos = {t.name: t for t in anatomy.tensors}
    assert infos["model.layers.1.mlp.experts.0.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert infos["model.layers.1.mlp.experts.0.up_proj.weight"].linear
    assert infos["model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"].note.startswith("scale")
    made = plan(anatomy, "nvfp4-rl")
    scale = made.entry_of("model.layers.1.mlp.experts.0.up_proj.weight_scale_inv")
    assert (scale.format, scale.bytes_after) == ("dropped", 0)
    kept = made.entry_of("model.layers.3.self_attn.o_proj.weight")
    assert (kept.format, kept.bytes_after) == ("bf16", 2 * kept.bytes_before)
    assert made.format_of("model.layers.3.self_attn.o_proj.weight_scale_inv") == "dropped"
    assert made.quantized == plan(write_folder(tmp_path / "bf16", DEEPSEEK, deepseek_headers()), "nvfp4-rl").quantized
    assert any("written as BF16" in warning for warning in made.warnings)


@pytest.mark.parametrize("break_it", ["missing", "shape"])
def test_an_fp8_weight_without_its_scale_is_refused_by_name(tmp_path, break_it):
    tensors = deepseek_headers(fp8=True)
    name = "model.layers.2.mlp.experts.3.down_proj.weight_scale_inv"
    if break_it == "missing":
        del tensors[name]
    else:
        tensors[name] = ("F32", (2, 1))
    with pytest.raises(AnatomyError, match=name):
        of_checkpoint(write_folder(tmp_path, {**DEEPSEEK, "quantization_config": FP8}, tensors))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, "quant_method 'fp8'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method 'modelopt'"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "compressed-tensors"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": ""}, "quant_method ''"),
        ({"quant_algo": "NVFP4"}, "NVFP4"),
    ],
)
def test_a_quantized_checkpoint_is_reported_and_refused_with_what_it_is(tmp_path, entry, says):
    tensors = {k: ("U8", (v[1][0], v[1][1] // 2)) if ".experts." in k else v for k, v in qwen_headers().items()}
    folder = write_folder(tmp_path, qwen_config(quantization_config=entry), tensors)
    assert of_checkpoint(folder).quantization.method == entry.get("quant_method", entry.get("quant_algo"))
    for recipe in ("nvfp4-rl", "bf16"):
        with pytest.raises(PlanError, match=f"already quantized.*{says}"):
            plan(folder, recipe)


def test_gpt_oss_as_published_in_mxfp4_is_refused_with_what_it_is(tmp_path):
    model = tiny("gpt_oss")
    tensors = {}
    for name, p in model.state_dict().items():
        if name.endswith("_proj") and ".experts." in name:
            tensors |= {
                f"{name}_blocks": ("U8", (4, p.shape[2], p.shape[1] // 32, 16)),
                f"{name}_scales": ("U8", (4, p.shape[2], p.shape[1] // 32)),
            }
        else:
            tensors[name] = ("BF16", tuple(p.shape))
    config = {**model.config.to_dict(), "quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16"}
    with pytest.raises(PlanError, match=r"already quantized.*'mxfp4'"):
        plan(write_folder(tmp_path, config, tensors), "nvfp4-rl")


def test_the_modelopt_side_file_counts_too(tmp_path):
    tensors = {k: ("F8_E4M3", v[1]) if ".experts." in k else v for k, v in qwen_headers().items()}
    folder = write_folder(tmp_path, qwen_config(), tensors)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(PlanError, match=r"hf_quant_config\.json.*modelopt"):
        plan(folder, "nvfp4-rl")


def test_a_swapq_checkpoint_says_that_it_is_converted_already(tmp_path):
    tensors = dict(qwen_headers())
    for name in [n for n in tensors if ".experts." in n]:
        n, k = tensors[name][1]
        tensors[name] = ("U8", (n, k // 2))
        tensors[f"{name}_scale"] = ("F8_E4M3", (n, k // 16))
        tensors[f"{name}_scale_2"] = ("F32", ())
    folder = write_folder(tmp_path, qwen_config(quantization_config={"quant_method": "swapq"}), tensors)
    anatomy = of_checkpoint(folder)
    assert (anatomy.experts[0].hidden, anatomy.experts[0].intermediate) == (64, 32)
    assert {t.role for t in anatomy.tensors if t.name.endswith("_scale_2")} == {Role.routed_experts}
    with pytest.raises(PlanError, match="already converted by swapq"):
        plan(folder, "nvfp4-rl")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "U8", "I8"])
def test_low_precision_weights_that_no_config_explains_are_refused(tmp_path, dtype):
    tensors = {k: (dtype, v[1]) if ".experts.1.up_proj" in k else v for k, v in qwen_headers().items()}
    with pytest.raises(PlanError, match=r"experts\.1\.up_proj.*no quantization_config"):
        plan(write_folder(tmp_path, qwen_config(), tensors), "nvfp4-rl")


def test_a_stale_quantization_config_over_bf16_files_is_refused_as_a_contradiction(tmp_path):
    folder = write_folder(tmp_path, qwen_config(quantization_config=FP8), qwen_headers())
    with pytest.raises(PlanError, match="stored unquantized; remove the stale entry"):
        plan(folder, "nvfp4-rl")


def test_an_empty_quantization_config_means_nothing(tmp_path):
    folder = write_folder(tmp_path, qwen_config(quantization_config=None), qwen_headers())
    assert plan(folder, "nvfp4-rl").quantized


def test_fewer_experts_in_the_files_than_in_the_config_are_named(tmp_path):
    folder = write_folder(tmp_path, qwen_config(num_experts=8), qwen_headers(experts=6))
    with pytest.raises(
        AnatomyError, match=r"says 8 experts, 6 are there; missing model\.layers\.0\.mlp\.experts\.6\.gate_proj\.weight"
    ):
        of_checkpoint(folder)


def test_more_experts_in_the_files_than_in_the_config_are_refused(tmp_path):
    folder = write_folder(tmp_path, qwen_config(num_experts=3), qwen_headers())
    with pytest.raises(AnatomyError, match="says 3 experts, 4 are there"):
        of_checkpoint(folder)


@pytest.mark.parametrize(
    "gone", ["model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.0.mlp.experts.3.down_proj.weight"]
)
def test_one_missing_tensor_of_one_expert_is_named(tmp_path, gone):
    tensors = qwen_headers()
    del tensors[gone]
    with pytest.raises(AnatomyError, match=gone.replace(".", r"\.")):
        of_checkpoint(write_folder(tmp_path, qwen_config(), tensors))


def test_a_layer_without_any_tensor_is_named(tmp_path):
    with pytest.raises(AnatomyError, match=r"says 3 layers; no tensor of layers\.2"):
        of_checkpoint(write_folder(tmp_path, qwen_config(num_hidden_layers=3), qwen_headers()))


def test_a_layer_that_should_have_experts_and_has_none_is_named(tmp_path):
    tensors = {k: v for k, v in qwen_headers().items() if "layers.1.mlp.experts" not in k}
    with pytest.raises(AnatomyError, match=r"layers\.1\.mlp\.experts is not in the files"):
        of_checkpoint(write_folder(tmp_path, qwen_config(), tensors))
    assert of_checkpoint(write_folder(tmp_path / "b", qwen_config(mlp_only_layers=[1]), tensors)).experts[-1].layer == 0


@pytest.mark.parametrize("changes", [{"hidden_size": 128}, {"moe_intermediate_size": 64}])
def test_sizes_that_disagree_with_the_config_are_refused(tmp_path, changes):
    (key,) = changes
    with pytest.raises(AnatomyError, match=f"{key} = {changes[key]}"):
        of_checkpoint(write_folder(tmp_path, qwen_config(**changes), qwen_headers()))


def test_one_expert_of_another_shape_is_named(tmp_path):
    tensors = qwen_headers()
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"] = ("BF16", (64, 64))
    with pytest.raises(
        AnatomyError, match=r"layers\.1\.mlp\.experts\.2\.up_proj\.weight is \[64, 64\], expected \[32, 64\]"
    ):
        of_checkpoint(write_folder(tmp_path, qwen_config(), tensors))


def test_a_tensor_of_experts_that_nobody_knows_is_refused_by_name(tmp_path):
    tensors = {**qwen_headers(), "model.layers.0.mlp.experts.0.lora_proj.weight": ("BF16", (8, 64))}
    with pytest.raises(AnatomyError, match="lora_proj"):
        of_checkpoint(write_folder(tmp_path, qwen_config(), tensors))


def test_fused_files_of_a_family_get_the_same_names_as_its_per_expert_files(tmp_path):
    fused = {k: v for k, v in qwen_headers().items() if ".experts." not in k}
    for i in range(2):
        fused[f"model.layers.{i}.mlp.experts.gate_up_proj"] = ("BF16", (4, 64, 64))
        fused[f"model.layers.{i}.mlp.experts.down_proj"] = ("BF16", (4, 64, 32))
    a = plan(write_folder(tmp_path / "fused", qwen_config(), fused), "nvfp4-rl")
    b = plan(write_folder(tmp_path / "single", qwen_config(), qwen_headers()), "nvfp4-rl")
    assert list(a.quantized) == list(b.quantized)
    entry = a.entry_of("model.layers.0.mlp.experts.gate_up_proj")
    assert entry.tensors[:2] == (
        "model.layers.0.mlp.experts.0.gate_proj.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
    )
    assert len(entry.tensors) == 8


def test_fused_files_that_do_not_fit_each_other_are_refused(tmp_path):
    tensors = {k: v for k, v in qwen_headers().items() if ".experts." not in k}
    for i in range(2):
        tensors[f"model.layers.{i}.mlp.experts.gate_up_proj"] = ("BF16", (4, 64, 64))
        tensors[f"model.layers.{i}.mlp.experts.down_proj"] = ("BF16", (4, 32, 64))
    with pytest.raises(AnatomyError, match="do not fit each other"):
        of_checkpoint(write_folder(tmp_path, qwen_config(), tensors))


def test_a_mixtral_checkpoint_with_live_names_is_spelled_like_the_hub(tmp_path):
    model = tiny("mixtral")
    a = of_checkpoint(save(model, tmp_path / "hub"))
    b = of_checkpoint(save(model, tmp_path / "live", save_original_format=False))
    assert {t.name for t in b.tensors} == set(model.state_dict())
    assert plan(a, "nvfp4-rl").quantized == plan(b, "nvfp4-rl").quantized
    assert b.hub_name("model.layers.0.mlp.gate.weight") == "model.layers.0.block_sparse_moe.gate.weight"


def test_a_prefix_in_front_of_the_decoder_is_carried_through(tmp_path):
    config = {"model_type": "qwen3_5_moe", "text_config": qwen_config(model_type="qwen3_5_moe_text")}
    tensors = {
        **qwen_headers(prefix="model.language_model"),
        "model.visual.blocks.3.mlp.gate_proj.weight": ("BF16", (64, 64)),
    }
    made = plan(write_folder(tmp_path, config, tensors), "mxfp8-rl")
    assert "model.language_model.layers.1.mlp.experts.3.down_proj.weight" in made.quantized
    assert made.entry_of("model.visual.blocks.3.mlp.gate_proj.weight").reason.startswith("vision")


def test_a_config_that_is_missing_or_broken_is_refused(tmp_path):
    folder = write_folder(tmp_path, qwen_config(), qwen_headers())
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        of_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        of_checkpoint(folder)
