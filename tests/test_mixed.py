"""One recipe with two formats: trainer, files in every layout, verification and loading agree on which weight has which."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import swapq
from swapq.checkpoint import layouts
from swapq.checkpoint.card import model_card
from swapq.checkpoint.inspection import inspect
from swapq.hf import foreign_config
from swapq.nn.experts import SwapqExperts
from swapq.nn.linear import SwapqLinear
from tests.helpers.mixed import FAMILIES, WEIGHTS, mixed
from tests.helpers.models import FAMILIES as MODELS
from tests.helpers.models import prompts


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folders(family: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A source, and what ``convert_checkpoint`` makes of it in every layout."""
    root = tmp_path_factory.mktemp(family)
    model = MODELS[family]().to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()  # as the Hub has it
    model.save_pretrained(root / "src")
    for name in layouts.names():
        swapq.convert_checkpoint(root / "src", root / name, mixed(family), layout=name, progress=False)
    return {"src": root / "src", **{name: root / name for name in layouts.names()}}


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def described(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def opened(folder: Path, layout: str) -> PreTrainedModel:
    if layout == "compressed-tensors":
        return AutoModelForCausalLM.from_pretrained(folder, config=foreign_config(folder))
    return AutoModelForCausalLM.from_pretrained(folder)


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(prompts()).logits


def test_the_plan_gives_each_role_its_format(folders: dict[str, Path], family: str) -> None:
    formats = {
        (entry.role.value, entry.format) for entry in swapq.plan(folders["src"], mixed(family)) if entry.quantized
    }
    expected = {("routed_experts", "nvfp4"), ("attention", "mxfp8")}
    if family == "deepseek_v3":
        expected |= {("shared_experts", "mxfp8"), ("dense_mlp", "mxfp8")}
    assert formats == expected


@pytest.mark.parametrize("layout", layouts.names())
def test_an_export_and_a_conversion_are_the_same_bytes_and_the_same_config(
    folders: dict[str, Path], family: str, layout: str, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["src"], dtype=torch.bfloat16)
    swapq.export(swapq.convert(model, mixed(family)), tmp_path / "out", layout=layout)
    ours, theirs = tensors(tmp_path / "out"), tensors(folders[layout])
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(ours[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert described(tmp_path / "out") == described(folders[layout])
    assert swapq.verify(tmp_path / "out", source=folders["src"]).problems == []
    for file in layouts.get(layout).extra_files(swapq.plan(folders["src"], mixed(family))):
        assert (tmp_path / "out" / file).read_text() == (folders[layout] / file).read_text()


@pytest.mark.parametrize("layout", layouts.names())
def test_it_verifies_against_its_source_and_reports_each_format(folders: dict[str, Path], layout: str) -> None:
    report = swapq.verify(folders[layout], source=folders["src"])
    assert report.problems == []
    formats = {(row["role"], row["format"]) for row in report.tensors.values()}
    assert {("routed_experts", "nvfp4"), ("attention", "mxfp8")} <= formats
    errors = report.totals["by_role"]
    assert errors["attention"]["rel_error"] < 0.05 < errors["routed_experts"]["rel_error"]
    assert "`nvfp4` before routed_experts" in model_card(folders[layout])


@pytest.mark.parametrize("layout", layouts.names())
def test_from_pretrained_computes_what_the_converted_model_does(
    folders: dict[str, Path], family: str, layout: str
) -> None:
    source = AutoModelForCausalLM.from_pretrained(folders["src"], dtype=torch.bfloat16)
    trainers = swapq.convert(source, mixed(family))
    loaded = opened(folders[layout], layout)
    assert [type(m).__name__ for m in loaded.modules()] == [type(m).__name__ for m in trainers.modules()]
    if layout == "compressed-tensors":  # the FP32 scale of experts went through its reciprocal
        assert torch.allclose(logits(loaded), logits(trainers), rtol=2e-2, atol=2e-2)
    else:
        assert torch.equal(logits(loaded), logits(trainers))
        assert swapq.digest(loaded) == swapq.digest(trainers) == swapq.digest(folders["swapq"])


def test_each_module_quantizes_its_rows_as_its_weights(family: str) -> None:
    model = swapq.convert(MODELS[family](), mixed(family))
    specs = {type(m): (m.spec.weights, m.spec.activations) for m in model.modules() if hasattr(m, "spec")}
    assert specs == {SwapqExperts: ("nvfp4", "nvfp4"), SwapqLinear: ("mxfp8", "mxfp8")}


@pytest.mark.parametrize("backward", ["dequantized", "high_precision"])
def test_a_training_step_reaches_every_master(family: str, backward: str) -> None:
    model = swapq.convert(MODELS[family](), mixed(family, backward=backward)).train()
    model(prompts(), labels=prompts()).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "bias" not in name:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert any(name.endswith("gate_up_proj") for name in changed)
    assert any("self_attn" in name for name in changed)


def test_modelopts_two_configs_agree_and_vllms_mixed_reader_asks_for_the_right_format(
    folders: dict[str, Path], family: str
) -> None:
    inner = described(folders["modelopt"])
    file = json.loads((folders["modelopt"] / "hf_quant_config.json").read_text())
    outer = file["quantization"]
    assert inner["quant_algo"] == outer["quant_algo"] == "MIXED_PRECISION"
    assert inner["ignore"] == outer["exclude_modules"]
    assert inner["quantized_layers"] == outer["quantized_layers"]
    assert inner["quantized_layers"].keys().isdisjoint(inner["ignore"])
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig

    assert ModelOptMixedPrecisionConfig.override_quantization_method(inner, None) == "modelopt_mixed"
    for given in (inner, file):
        parsed = ModelOptMixedPrecisionConfig.from_config(given)
        parsed.packed_modules_mapping = _packed()
        for layer, fmt in _engine_layers(family).items():
            assert parsed.is_layer_excluded(layer) == (fmt is None), layer
            if fmt is not None:
                assert parsed._resolve_quant_algo(layer) == fmt.upper(), layer


def test_vllms_compressed_tensors_reader_finds_each_layers_group(folders: dict[str, Path], family: str) -> None:
    given = described(folders["compressed-tensors"])
    assert given["format"] == "mixed-precision"
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    parsed = CompressedTensorsConfig.from_config(given)
    parsed.packed_modules_mapping = _packed()
    for layer, fmt in _engine_layers(family).items():
        kind = torch.nn.Module if layer.endswith(".experts") else LinearBase
        found = parsed.get_scheme_dict(
            kind.__new__(kind), f"{layer}.0.gate_proj" if layer.endswith(".experts") else layer
        )
        assert (found and found["format"]) == (
            fmt and {"nvfp4": "nvfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}[fmt]
        )


def _packed() -> dict[str, list[str]]:
    return {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
        "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
    }


def _engine_layers(family: str) -> dict[str, str | None]:
    """What vLLM calls its layers, and the format of each."""
    if family == "qwen3_moe":
        return {
            "model.layers.0.self_attn.qkv_proj": "mxfp8",
            "model.layers.0.self_attn.o_proj": "mxfp8",
            "model.layers.0.mlp.experts": "nvfp4",
            "model.layers.0.mlp.gate": None,
            "model.layers.1.self_attn.qkv_proj": None,
            "model.layers.1.mlp.experts": None,
            "lm_head": None,
        }
    return {
        "model.layers.0.self_attn.fused_qkv_a_proj": "mxfp8",
        "model.layers.0.self_attn.q_b_proj": "mxfp8",
        "model.layers.0.self_attn.kv_b_proj": None,
        "model.layers.0.mlp.gate_up_proj": "mxfp8",
        "model.layers.1.mlp.experts": "nvfp4",
        "model.layers.1.mlp.shared_experts.gate_up_proj": "mxfp8",
        "model.layers.1.mlp.shared_experts.down_proj": "mxfp8",
        "model.layers.1.mlp.gate": None,
        "lm_head": None,
    }


@pytest.mark.parametrize("key", ["quant_algo", "quantized_layers", "exclude_modules"])
def test_two_configs_that_disagree_are_found(folders: dict[str, Path], key: str, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((folders["modelopt"] / file).read_bytes())
    said = json.loads((folders["modelopt"] / "hf_quant_config.json").read_text())
    said["quantization"][key] = {"quant_algo": "NVFP4", "quantized_layers": {}, "exclude_modules": []}[key]
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    assert [p for p in swapq.verify(tmp_path).problems if key in p and "config.json differ" in p]


def test_inspect_counts_each_format(folders: dict[str, Path], family: str) -> None:
    notes = " ".join(inspect(folders["compressed-tensors"]).notes)
    assert re.search(r"quantized weights: \d+ mxfp8, 24 nvfp4", notes)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_weight_that_the_config_lists_and_the_file_lacks_is_found(
    folders: dict[str, Path], layout: str, tmp_path: Path
) -> None:
    stored = tensors(folders[layout])
    module = "model.layers.0.self_attn.o_proj"
    for name in [name for name in stored if name.startswith(f"{module}.")]:
        del stored[name]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folders[layout] / "config.json").read_text())
    assert any(module in problem and "missing" in problem for problem in swapq.verify(tmp_path).problems)
    with pytest.raises(swapq.SwapqError, match=rf"lacks \d quantized tensors that its config lists: {module}\.weight"):
        opened(tmp_path, layout)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_stored_weight_that_a_mixed_config_does_not_list_is_refused_by_name(
    folders: dict[str, Path], layout: str, tmp_path: Path
) -> None:
    config = json.loads((folders[layout] / "config.json").read_text())
    module, given = "model.layers.0.self_attn.o_proj", config["quantization_config"]
    if layout == "modelopt":
        del given["quantized_layers"][module]
    else:
        for group in given["config_groups"].values():
            group["targets"] = [target for target in group["targets"] if target != module]
    (tmp_path / "model.safetensors").write_bytes((folders[layout] / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert any(module in problem for problem in swapq.verify(tmp_path).problems)
    with pytest.raises(swapq.SwapqError, match=f"{module}, which is stored quantized"):
        opened(tmp_path, layout)


def test_the_documented_recipe_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text()
    (tmp_path / "mine.json").write_text(page.partition("```json\n")[2].partition("```")[0])
    recipe = swapq.Recipe.resolve(tmp_path / "mine.json")
    assert recipe.weights == recipe.activations == WEIGHTS


def test_a_foreign_config_may_name_a_stack_of_experts_or_use_patterns(folders: dict[str, Path], family: str) -> None:
    weights = swapq.plan(folders["src"], mixed(family)).quantized
    modules = [weight.removesuffix(".weight") for weight in weights]
    stacks = {
        (name.partition(".experts.")[0] + ".experts" if ".experts." in name else name): fmt
        for name, fmt in zip(modules, weights.values(), strict=True)
    }
    listed = {name: {"quant_algo": fmt.upper()} for name, fmt in stacks.items()}
    modelopt = {"quant_algo": "MIXED_PRECISION", "quantized_layers": listed}
    assert layouts.get("modelopt").quantized(modelopt, modules) == dict(weights)
    groups = {
        "group_0": {"targets": ["re:.*mlp\\.experts.*"], "format": "nvfp4-pack-quantized"},
        "group_1": {"targets": ["Linear"], "format": "mxfp8-quantized"},
    }
    compressed = {"format": "mixed-precision", "config_groups": groups}
    assert layouts.get("compressed-tensors").quantized(compressed, modules) == dict(weights)


@pytest.mark.parametrize(
    ("first", "second"), [("swapq", "modelopt"), ("compressed-tensors", "swapq"), ("modelopt",) * 2]
)
def test_an_export_replaces_an_earlier_one_of_any_layout(family: str, tmp_path: Path, first: str, second: str) -> None:
    model = swapq.convert(MODELS[family](), mixed(family))
    for layout in (first, second):
        swapq.export(model, tmp_path, layout=layout)
    assert described(tmp_path)["quant_method"] == second
    assert (tmp_path / "hf_quant_config.json").exists() == (second == "modelopt")
    assert swapq.verify(tmp_path).problems == []
