"""The list decides: names through vLLM's mappers, merged layers, mixed formats, and what a layer refuses. No engine needed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swapq import formats
from swapq.errors import CheckpointError, SwapqError, UnsupportedError
from swapq.nn.expert_block import FrozenExpertLinear, expert_block
from swapq.nn.gate import Gate
from swapq.qtensor import quantize
from swapq.recipe_rules import FORMATS

pytest.importorskip("vllm")

from vllm.model_executor.models.utils import WeightsMapper

import swapq_vllm
from swapq_vllm.config import SwapqConfig
from swapq_vllm.loading import Arrivals, guard_experts
from swapq_vllm.ops import routed_experts, stacked_linear
from swapq_vllm.soundness import unsound
from swapq_vllm.unusable import unusable_config

PREFIX = "model.layers.0.mlp.experts"


def experts(
    prefix: str = PREFIX, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"), count: int = 2
) -> list[str]:
    return [f"{prefix}.{e}.{name}.weight" for e in range(count) for name in names]


def config(**quantized: list[str]) -> SwapqConfig:
    return SwapqConfig({"name": "test", "activations": "nvfp4"}, quantized)


def test_names_follow_the_model_classs_renaming() -> None:
    ours = config(nvfp4=experts("model.language_model.layers.0.mlp.experts"))
    ours.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.language_model.": "language_model.model."}))
    found = ours._experts_of("language_model.model.layers.0.mlp.experts")
    assert found[1, "w3"] == "model.language_model.layers.0.mlp.experts.1.up_proj.weight"
    assert len(found) == 6


@pytest.mark.parametrize(
    ("names", "shards"),
    [
        (("gate_proj", "up_proj", "down_proj"), "w1 w3 w2"),
        (("w1", "w3", "w2"), "w1 w3 w2"),
        (("up_proj", "down_proj"), "w1 w2"),
    ],
    ids=["hub", "mixtral", "no gate"],
)
def test_projections_are_known_by_every_familys_names(names: tuple[str, ...], shards: str) -> None:
    found = config(nvfp4=experts(names=names))._experts_of(PREFIX)
    assert [found[0, shard].split(".")[-2] for shard in shards.split()] == list(names)


def test_a_prefix_is_matched_on_whole_parts() -> None:
    ours = config(nvfp4=experts("model.layers.10.mlp.experts"))
    assert not ours._experts_of("model.layers.1")
    assert not ours._experts_of("model.layers.1.mlp.experts")


def test_a_merged_linear_takes_the_names_of_its_parts() -> None:
    ours = config(
        mxfp8=[f"l.self_attn.{p}_proj.weight" for p in "qkv"] + ["l.mlp.gate_proj.weight", "l.mlp.up_proj.weight"]
    )
    assert ours._shards_of("l.self_attn.qkv_proj") == {p: f"l.self_attn.{p}_proj.weight" for p in "qkv"}
    assert ours._shards_of("l.mlp.gate_up_proj") == {0: "l.mlp.gate_proj.weight", 1: "l.mlp.up_proj.weight"}
    assert ours._shards_of("l.self_attn.o_proj") == {}
    ours.packed_modules_mapping = {"fused_qkv_a_proj": ["q_proj", "k_proj"]}
    assert list(ours._shards_of("l.self_attn.fused_qkv_a_proj")) == [0, 1]


def test_formats_mixed_in_one_layer_are_refused() -> None:
    ours = config(nvfp4=["a.gate_proj.weight"], mxfp8=["a.up_proj.weight"])
    with pytest.raises(UnsupportedError, match=r"a\.gate_up_proj.*mixes mxfp8 and nvfp4"):
        ours._one_format("a.gate_up_proj", list(ours._shards_of("a.gate_up_proj").values()), "some")


def test_rows_have_the_format_of_their_weights_role() -> None:
    ours = SwapqConfig({"name": "test", "activations": {"routed_experts": "nvfp4", "attention": "mxfp8"}}, {})
    assert ours.activations_of(f"{PREFIX}.0.gate_proj.weight") == "nvfp4"
    assert ours.activations_of("model.layers.0.self_attn.q_proj.weight") == "mxfp8"
    assert ours.activations_of("model.layers.0.mlp.shared_experts.up_proj.weight") == "bf16"
    assert config().activations_of("model.layers.0.self_attn.q_proj.weight") == "nvfp4"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version 2"),
        ({"layout": "modelopt"}, "modelopt"),
        ({"recipe": None}, "recipe"),
        ({"quantized": ["a.weight"]}, "quantized"),
        ({"quantized": {"int5": []}}, "int5"),
        ({"quantized": {"nvfp4_tile": ["a.weight"]}}, "not for rollouts: .*depends on its neighbours"),
        ({"quantized": {"nvfp4": ["a.weight"], "mxfp8": ["a.weight"]}}, "twice"),
        ({"quantized": {"nvfp4": ["a.proj"]}}, "a.proj"),
    ],
)
def test_a_configuration_that_is_not_one_is_refused(change: dict[str, Any], says: str) -> None:
    good = {
        "quant_method": "swapq",
        "version": 1,
        "layout": "swapq",
        "recipe": {"name": "x"},
        "quantized": {"nvfp4": ["a.weight"]},
    }
    assert SwapqConfig.from_config(good).formats == {"a.weight": "nvfp4"}
    with pytest.raises(SwapqError, match=says):
        SwapqConfig.from_config(good | change)


def test_what_is_not_for_rollouts_is_served_if_the_recipe_forces_it() -> None:
    forced = {"version": 1, "layout": "swapq", "recipe": {"name": "x", "force_rollout": True}}
    assert SwapqConfig.from_config(forced | {"quantized": {"nvfp4_tile": ["a.weight"]}}).formats == {
        "a.weight": "nvfp4_tile"
    }


def test_a_linear_outside_the_experts_has_no_scale_over_its_whole_weight() -> None:
    from vllm.model_executor.layers.linear import LinearBase

    ours = config(nvfp4=["l.self_attn.o_proj.weight"])
    with pytest.raises(UnsupportedError, match="FP32 scale spans a whole weight"):
        ours.get_quant_method(LinearBase.__new__(LinearBase), "l.self_attn.o_proj")


@pytest.mark.parametrize(
    ("fmt", "part", "good", "bad"),
    [
        ("fp8_block", "scales", [1e-13, 2.0], [0.0, -1.0, torch.inf, torch.nan]),
        ("int4", "scales", [1e-5, 0.5], [0.0, -0.5, torch.inf, torch.nan]),
        ("nvfp4", "global_scale", [1e-30, 1.0], [0.0, -1.0, torch.nan]),
    ],
)
def test_scales_that_no_quantizer_writes_are_unsound(fmt: str, part: str, good: list[float], bad: list[float]) -> None:
    dtype = formats.get(fmt).dtypes[part]
    assert not unsound(torch.tensor(good, dtype=dtype), fmt, part).any()
    assert unsound(torch.tensor(bad, dtype=dtype), fmt, part).all()


def test_codes_outside_the_range_are_unsound() -> None:
    q = quantize(torch.randn(4, 64).to(torch.bfloat16), "int4", block=32)
    packed = q.spec.stored(q.parts).codes
    assert not unsound(packed, "int4_g32", "codes").any()
    packed[1, 3] = 0x38  # 3 and -8
    packed[2, 5] = 0x81
    assert unsound(packed, "int4_g32", "codes").nonzero().tolist() == [[1, 3], [2, 5]]
    codes = torch.tensor([0.5, torch.nan]).to(torch.float8_e4m3fn)
    assert unsound(codes, "fp8_block", "codes").tolist() == [False, True]


def test_registering_twice_changes_nothing() -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config

    swapq_vllm.register()
    swapq_vllm.register()
    assert get_quantization_config("swapq") is SwapqConfig


def test_a_plugin_that_cannot_be_used_says_why_when_it_is_needed() -> None:
    broken = unusable_config(RuntimeError("vLLM 9.9"))
    with pytest.raises(UnsupportedError, match=r"vLLM 9\.9"):
        broken.from_config({})
    with pytest.raises(UnsupportedError, match=r"vLLM 9\.9"):
        broken.get_min_capability()


def test_names_of_classes_and_ops_set_off_nothing_in_vllm() -> None:
    from swapq_vllm import experts_method, linear_method, unquantized

    for module in (experts_method, linear_method, unquantized):
        for name in module.__all__:
            assert "modelopt" not in name.lower()
            assert "compressed" not in name.lower()
    assert routed_experts._qualname == "swapq::routed_experts"
    assert stacked_linear._qualname == "swapq::stacked_linear"


def _method(**moe: Any) -> Any:
    from swapq_vllm.experts_method import SwapqExpertsMethod

    settings = {"moe_parallel_config": SimpleNamespace(tp_size=1), "has_bias": False} | moe
    return SwapqExpertsMethod(
        SimpleNamespace(**settings), prefix=PREFIX, fmt="nvfp4", activations="nvfp4", expert_tp=1, names={}
    )


def _layer(**changes: Any) -> Any:
    layer = {"activation": SimpleNamespace(value="silu"), "apply_router_weight_on_input": False, "swiglu_limit": None}
    return SimpleNamespace(**(layer | changes))


@pytest.mark.parametrize(
    ("method", "layer", "tp", "sizes", "says"),
    [
        ({}, {"activation": SimpleNamespace(value="swigluoai")}, 1, (64, 64), "swigluoai"),
        ({}, {"apply_router_weight_on_input": True}, 1, (64, 64), "apply_router_weight_on_input"),
        ({}, {"swiglu_limit": 7.0}, 1, (64, 64), "swiglu_limit"),
        ({"has_bias": True}, {}, 1, (64, 64), "biases"),
        ({"tp_shard_with_padding": True}, {}, 1, (64, 64), "padded"),
        ({}, {}, 2, (64, 64), "expert_tp=1"),
        ({}, {}, 1, (64, 232), "232"),
        ({}, {}, 1, (72, 64), "72"),
    ],
)
def test_a_layer_that_would_not_be_the_trainers_is_refused_by_name(
    method: dict[str, Any], layer: dict[str, Any], tp: int, sizes: tuple[int, int], says: str
) -> None:
    with pytest.raises(SwapqError, match=says) as caught:
        _method(**method)._require_supported(_layer(**layer), tp, *sizes)
    assert PREFIX in str(caught.value)


class _Experts(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(2, 8, 4, dtype=dtype), requires_grad=False)

    def weight_loader(
        self, param: Any, loaded: Any, name: str, shard: str, expert: int, return_success: bool = False
    ) -> bool:
        param.data[expert, 0 if shard == "w1" else 4 :][:4].copy_(loaded)
        return True


def test_a_loader_takes_its_own_dtype_and_shape_only_and_counts() -> None:
    layer = _Experts(torch.uint8)
    names = {(e, s): f"{PREFIX}.{e}.{p}.weight" for e in range(2) for s, p in (("w1", "gate_proj"), ("w3", "up_proj"))}
    arrivals = Arrivals(names)
    load = guard_experts(layer, arrivals, {("w13_weight", s): (4, 4) for s in ("w1", "w3")})
    for bad in (torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.float8_e8m0fnu), torch.zeros(4, 8, dtype=torch.uint8)):
        with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj\.weight"):
            load(layer.w13_weight, bad, "w13_weight", "w3", 1)
    slots = list(names)
    for expert, shard in slots[:3]:
        load(layer.w13_weight, torch.ones(4, 4, dtype=torch.uint8), "w13_weight", shard, expert)
    with pytest.raises(CheckpointError, match=r"1 tensors were not loaded: .*experts\.1\.up_proj\.weight"):
        arrivals.require(layer, {"w13_weight": slots})


def test_a_scalar_may_arrive_with_one_dimension_and_nothing_else_may() -> None:
    got: list[torch.Size] = []

    class Layer(_Experts):
        def weight_loader(self, param: Any, loaded: Any, *arguments: Any, return_success: bool = False) -> bool:
            got.append(loaded.shape)
            return True

    layer = Layer(torch.float32)
    load = guard_experts(layer, Arrivals({(0, "w1"): "a.weight"}), {("w13_weight", "w1"): ()})
    for shape in ((), (1,)):
        load(layer.w13_weight, torch.ones(shape), "w13_weight", "w1", 0)
    assert got == [torch.Size([]), torch.Size([])]
    for shape in ((1, 1), (2,)):
        with pytest.raises(CheckpointError, match=r"a\.weight"):
            load(layer.w13_weight, torch.ones(shape), "w13_weight", "w1", 0)


def test_parts_of_a_load_that_failed_do_not_count_for_the_next() -> None:
    layer = _Experts(torch.uint8)
    arrivals = Arrivals({(0, "w1"): "a.weight", (0, "w3"): "b.weight"})
    load = guard_experts(layer, arrivals, {("w13_weight", s): (4, 4) for s in ("w1", "w3")})
    load(layer.w13_weight, torch.ones(4, 4, dtype=torch.uint8), "w13_weight", "w1", 0)
    layer.w13_weight = nn.Parameter(
        torch.zeros(2, 8, 4, dtype=torch.uint8), requires_grad=False
    )  # as every update does
    load(layer.w13_weight, torch.ones(4, 4, dtype=torch.uint8), "w13_weight", "w3", 0)
    with pytest.raises(CheckpointError, match=r"a\.weight"):
        arrivals.require(layer, {"w13_weight": [(0, "w1"), (0, "w3")]})


@pytest.mark.parametrize(
    ("fmt", "part", "byte", "bad"),
    [
        ("nvfp4", "codes", 0xFF, False),
        ("nvfp4", "scales", 0x7F, True),
        ("nvfp4", "scales", 0x80, True),
        ("nvfp4", "scales", 0x7E, False),
        ("mxfp8", "codes", 0xFF, True),
        ("mxfp8", "codes", 0xFE, False),
        ("mxfp8", "scales", 0xFF, True),
        ("mxfp8", "scales", 0xFE, False),
    ],
)
def test_what_no_quantizer_writes_is_found(fmt: str, part: str, byte: int, bad: bool) -> None:
    stored = torch.tensor([1, byte], dtype=torch.uint8).view(formats.get(fmt).dtypes[part])
    assert unsound(stored, fmt, part).tolist() == [False, bad]


@pytest.mark.parametrize("value", [0.0, -1.0, torch.inf, torch.nan])
def test_an_fp32_scale_is_finite_and_positive(value: float) -> None:
    assert unsound(torch.tensor([1.0, value]), "nvfp4", "global_scale").tolist() == [False, True]


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "fp8_block", "int4_g32"])
@pytest.mark.parametrize("stored", ["operands", "codes"])
def test_the_op_is_the_expert_block_and_honours_the_expert_map(fmt: str, stored: str) -> None:
    generator = torch.Generator().manual_seed(0)

    form, rows_format = formats.get(fmt), FORMATS[fmt].activations[0]
    scope = form.scope_of_stack(64, 2)  # FP8 block: 128 does not divide either half

    def weight(*shape: int, scope: str | None = None) -> Any:
        return quantize(torch.randn(shape, generator=generator).to(torch.bfloat16), fmt, scope=scope)

    gate_up, down = weight(4, 64, 64, scope=scope), weight(4, 64, 32)
    x = torch.randn(9, 64, generator=generator).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(9)])
    weights = torch.rand(9, 2, generator=generator)

    def listed(q: Any, rows: slice) -> list[torch.Tensor]:
        parts = q.operand() if stored == "operands" else form.stored(q.parts)
        return [t[rows] for t in parts if t is not None]

    def run(rows: slice, expert_map: torch.Tensor | None) -> torch.Tensor:
        format_name = "" if stored == "operands" else fmt if scope == form.default_scope else f"{fmt}:{scope}"
        return routed_experts(
            x,
            weights,
            ids.int(),
            expert_map,
            listed(gate_up, rows),
            listed(down, rows),
            format_name,
            rows_format,
            "silu",
            True,
        )

    linears = [FrozenExpertLinear(*q.operand(), rows_format) for q in (gate_up, down)]
    whole = expert_block(x, ids, weights, *linears, num_experts=4, gate=Gate("silu"))
    assert torch.equal(run(slice(None), None), whole)
    for here in ((0, 1), (2, 3)):
        expert_map = torch.full((4,), -1, dtype=torch.int32)
        expert_map[list(here)] = torch.arange(2, dtype=torch.int32)
        mine = torch.isin(ids, torch.tensor(here))
        only = expert_block(x, ids.where(mine, -1), weights, *linears, num_experts=4, gate=Gate("silu"))
        assert torch.equal(run(slice(here[0], here[1] + 1), expert_map), only)


def test_the_ops_pass_torchs_own_checks() -> None:
    x = torch.randn(3, 64).to(torch.bfloat16)
    first, second = (quantize(torch.randn(2, n, 64).to(torch.bfloat16), "nvfp4").operand() for n in (128, 64))
    routing = (torch.rand(3, 1), torch.zeros(3, 1, dtype=torch.int64), None)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        routed_experts, (x, *routing, list(first), list(second), "", "nvfp4", "silu", True), test_utils=checks
    )
    values, _ = quantize(torch.randn(96, 64).to(torch.bfloat16), "mxfp8").operand()
    torch.library.opcheck(stacked_linear, (x, [values], None, "", "mxfp8"), test_utils=checks)


def test_a_hub_checkpoint_is_checked_once_it_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants
    from safetensors.torch import save_file

    from swapq_vllm.headers import check_downloaded

    snapshot = tmp_path / "models--us--ours" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--us--ours" / "refs").mkdir()
    (tmp_path / "models--us--ours" / "refs" / "main").write_text("0" * 40)
    save_file(
        {"a.weight": torch.zeros(2, 8, dtype=torch.uint8), "a.weight_scales": torch.ones(2, 1)},
        snapshot / "model.safetensors",
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    ours = config(nvfp4=["a.weight"])
    ours.maybe_update_config("us/ours")
    assert ours.to_download == ("us/ours", None)
    with pytest.raises(CheckpointError, match=r"a\.weight_scale is missing.*a\.weight_scales .* belongs to no weight"):
        check_downloaded("us/ours", None, ours.formats)
    check_downloaded("us/absent", None, ours.formats)
