"""Layouts: the same codes under three spellings, read back to the same values by the readers that other people use."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import swapq
from swapq.checkpoint import layouts
from swapq.plan import plan
from tests.helpers.models import FAMILIES, qwen3_moe
from tests.helpers.recipes import tiny

RECIPES = {"nvfp4": "nvfp4-rl", "mxfp8": "mxfp8-rl", "fp8_block": "fp8-block-rl", "int4_g32": "int4-qat"}


def holding(fmt: str) -> list[str]:
    """The layouts that can hold a format."""
    return [name for name in layouts.names() if fmt in layouts.get(name).formats]


@pytest.fixture(scope="module", params=RECIPES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One source converted to every layout."""
    root = tmp_path_factory.mktemp(request.param)
    qwen3_moe().to(torch.bfloat16).save_pretrained(root / "src")
    made = {"src": root / "src", "fmt": Path(request.param)}
    for name in holding(request.param):
        recipe = tiny(RECIPES[request.param], last_layers_bf16=1)
        swapq.convert_checkpoint(root / "src", root / name, recipe, layout=name, workers=2, progress=False)
        made[name] = root / name
    return made


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def test_every_layout_decodes_to_the_same_codes_scales_and_global_scale(folders: dict[str, Path]) -> None:
    fmt = folders["fmt"].name
    made = plan(folders["src"], tiny(RECIPES[fmt], last_layers_bf16=1))
    stored = {name: tensors(folders[name]) for name in holding(fmt)}
    for weight in made.quantized:
        parts = {name: layouts.get(name).decode(weight, fmt, stored[name]) for name in holding(fmt)}
        for name, found in parts.items():
            expected = parts["swapq"]
            assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8)), (name, weight)
            assert torch.equal(found.scales.view(torch.uint8), expected.scales.view(torch.uint8)), (name, weight)
            if expected.global_scale is not None:
                assert found.global_scale is not None
                assert torch.allclose(found.global_scale, expected.global_scale, rtol=1e-6, atol=0)


def test_what_is_not_quantized_is_the_same_in_every_layout(folders: dict[str, Path]) -> None:
    source = tensors(folders["src"])
    for name in holding(folders["fmt"].name):
        found = tensors(folders[name])
        kept = [k for k in source if k in found and found[k].dtype == source[k].dtype and "experts" not in k]
        assert len(kept) >= 5
        assert all(torch.equal(source[k], found[k]) for k in kept)


def test_the_two_configs_of_modelopt_agree(folders: dict[str, Path]) -> None:
    if "modelopt" not in folders:
        pytest.skip("ModelOpt has no such format")
    inner = config(folders["modelopt"])
    outer = json.loads((folders["modelopt"] / "hf_quant_config.json").read_text())["quantization"]
    assert inner["quant_algo"] == outer["quant_algo"] == folders["fmt"].name.upper()
    assert inner["ignore"] == outer["exclude_modules"]
    assert inner["group_size"] == outer["group_size"]


def test_the_ignore_list_names_every_router_and_every_kept_linear_and_nothing_quantized(
    folders: dict[str, Path],
) -> None:
    made = plan(folders["src"], tiny(RECIPES[folders["fmt"].name], last_layers_bf16=1))
    for name in set(holding(folders["fmt"].name)) - {"swapq"}:
        ignored = set(config(folders[name])["ignore"])
        for entry in made:
            if len(entry.shape) == 2 and not entry.quantized:
                assert entry.name.removesuffix(".weight") in ignored
        assert {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"} <= ignored
        assert not ignored & {w.removesuffix(".weight") for w in made.quantized}
        assert not any("*" in entry or entry.startswith("re:") or entry.endswith(".") for entry in ignored)


def test_compressed_tensors_own_decompressor_gives_our_values(folders: dict[str, Path]) -> None:
    compressed_tensors = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    assert compressed_tensors
    fmt, described = folders["fmt"].name, config(folders["compressed-tensors"])
    scheme = QuantizationConfig.model_validate(described).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(described["format"])
    stored = tensors(folders["compressed-tensors"])
    made = plan(folders["src"], tiny(RECIPES[fmt], last_layers_bf16=1))
    for weight in list(made.quantized)[::7]:
        prefix = weight.removesuffix("weight")
        local = {k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)}
        local = {
            k: v.view(torch.float8_e4m3fn) if v.dtype == torch.uint8 and k == "weight" else v for k, v in local.items()
        }
        theirs = compressor.decompress(local, scheme)["weight"].float()
        parts = layouts.get("compressed-tensors").decode(weight, fmt, stored)
        ours = swapq.formats.get(fmt).dequantize(parts, scope=swapq.formats.get(fmt).default_scope, axis=-1)
        assert torch.allclose(theirs, ours, rtol=4e-3, atol=0), weight  # they round to BF16 on the way


def test_vllms_own_parsers_accept_the_configs_and_ask_for_the_right_layers(folders: dict[str, Path]) -> None:
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config, ModelOptNvFp4Config

    fmt = folders["fmt"].name
    if "modelopt" not in folders:
        pytest.skip("ModelOpt has no such format")
    reader = ModelOptNvFp4Config if fmt == "nvfp4" else ModelOptMxFp8Config
    for described in (
        config(folders["modelopt"]),
        json.loads((folders["modelopt"] / "hf_quant_config.json").read_text()),
    ):
        parsed = reader.from_config(described)
        parsed.packed_modules_mapping = {
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
            "gate_up_proj": ["gate_proj", "up_proj"],
        }
        assert not parsed.is_layer_excluded("model.layers.0.mlp.experts")
        assert parsed.is_layer_excluded("model.layers.1.mlp.experts")
        assert parsed.is_layer_excluded("model.layers.0.mlp.gate")
        assert parsed.is_layer_excluded("lm_head")
        assert parsed.is_layer_excluded("model.layers.0.self_attn.qkv_proj") == (fmt == "nvfp4")


def test_vllms_compressed_tensors_parser_accepts_the_config(folders: dict[str, Path]) -> None:
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    parsed = CompressedTensorsConfig.from_config(config(folders["compressed-tensors"]))
    assert set(parsed.ignore) == set(config(folders["compressed-tensors"])["ignore"])
    assert parsed.quant_format == config(folders["compressed-tensors"])["format"]


@pytest.mark.parametrize("recipe", ["fp8-block-rl", "int4-qat"])
def test_a_layout_that_cannot_hold_a_format_is_refused_from_a_folder_and_from_a_live_model(
    tmp_path: Path, recipe: str
) -> None:
    model = qwen3_moe().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "src")
    with pytest.raises(swapq.SwapqError, match="layout 'modelopt' cannot hold"):
        swapq.convert_checkpoint(tmp_path / "src", tmp_path / "a", tiny(recipe), layout="modelopt", progress=False)
    with pytest.raises(swapq.SwapqError, match="layout 'modelopt' cannot hold"):
        swapq.export(swapq.convert(model, tiny(recipe)), tmp_path / "b", layout="modelopt")
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()


def test_a_scale_is_a_multiplier_in_one_layout_and_a_divisor_in_the_other() -> None:
    q = swapq.quantize(torch.randn(32, 64).to(torch.bfloat16), "nvfp4")
    weight = "x.weight"
    one = layouts.get("modelopt").encode(weight, "nvfp4", q.parts)["x.weight_scale_2"]
    other = layouts.get("compressed-tensors").encode(weight, "nvfp4", q.parts)["x.weight_global_scale"]
    assert one.shape == ()
    assert other.shape == (1,)
    assert torch.allclose(one * other, torch.ones(1))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gpt_oss"])
@pytest.mark.parametrize("layout", layouts.names())
def test_what_a_layout_promises_is_what_the_file_holds(tmp_path: Path, family: str, layout: str) -> None:
    FAMILIES[family]().to(torch.bfloat16).save_pretrained(tmp_path / "src")
    recipe = swapq.Recipe.named("nvfp4-rl", last_layers_bf16=0)
    swapq.convert_checkpoint(tmp_path / "src", tmp_path / "dst", recipe, layout=layout, progress=False)
    stored = tensors(tmp_path / "dst")
    made = plan(tmp_path / "src", recipe)
    for weight, fmt in made.quantized.items():
        codes = stored.get(weight, stored.get(weight.replace(".weight", ".weight_packed")))
        assert codes is not None
        for promised in layouts.get(layout).stored(weight, fmt, (codes.shape[0], codes.shape[1] * 2)):
            assert (stored[promised.name].dtype, tuple(stored[promised.name].shape)) == (promised.dtype, promised.shape)
