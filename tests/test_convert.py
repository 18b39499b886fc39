"""swapq.convert: what the swapped model is, computes and keeps, in every mode a trainer puts it in."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import swapq
import swapq.nn.experts
import swapq.nn.functional
from swapq.checkpoint.tensors import checkpoint_tensors
from swapq.nn.experts import SwapqExperts
from swapq.nn.linear import SwapqLinear
from tests.helpers.models import FAMILIES, prompts, qwen3_moe
from tests.helpers.recipes import tiny
from tests.helpers.remote import listed_experts

RECIPES = [
    ("nvfp4-rl", "dequantized"),
    ("nvfp4-rl", "high_precision"),
    ("mxfp8-rl", "low_precision"),
    ("mxfp8-rl", "high_precision"),
    ("mxfp8-rl", "dequantized"),
    ("fp8-block-rl", "low_precision"),
    ("fp8-block-rl", "high_precision"),
    ("fp8-block-rl", "dequantized"),
    ("int4-qat", "dequantized"),
]
MATCHED = ["nvfp4-rl", "mxfp8-rl", "fp8-block-rl", "int4-qat"]
IDS = [f"{r}-{b}" for r, b in RECIPES]


def converted(recipe: str = "nvfp4-rl", model: PreTrainedModel | None = None, **overrides: object) -> PreTrainedModel:
    return swapq.convert(model or qwen3_moe(), tiny(recipe), **({"last_layers_bf16": 0} | overrides))


def gradients(model: PreTrainedModel, ids: Tensor | None = None) -> dict[str, Tensor]:
    ids = prompts() if ids is None else ids
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@contextmanager
def counted_weight_quantizations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    calls: list[str] = []
    real = swapq.nn.functional.quantize_weight

    def counted(*args: object, **kwargs: object) -> swapq.QTensor:
        calls.append("weight")
        return real(*args, **kwargs)

    monkeypatch.setattr(swapq.nn.experts, "quantize_weight", counted)
    yield calls


# What it is


@pytest.mark.parametrize(("recipe", "backward"), RECIPES, ids=IDS)
def test_parameters_keep_names_values_dtypes_and_identity(recipe: str, backward: str) -> None:
    model = qwen3_moe()
    before = dict(model.named_parameters())
    values = {k: v.detach().clone() for k, v in before.items()}
    assert converted(recipe, model, backward=backward) is model
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    for name, parameter in after.items():
        assert parameter is before[name]
        assert type(parameter) is nn.Parameter
        assert parameter.requires_grad
        assert torch.equal(parameter, values[name])


def test_print_shows_format_scale_and_backward() -> None:
    text = repr(converted("nvfp4-rl").model.layers[0])
    assert "SwapqExperts" in text
    assert "nvfp4" in text
    assert "one scale per token" in text
    assert "backward=dequantized" in text
    assert "SwapqLinear" in repr(converted("mxfp8-rl").model.layers[0].self_attn)


def test_bf16_swaps_nothing_and_is_remembered() -> None:
    model = qwen3_moe()
    expected = model(prompts()).logits
    swapq.convert(model, "bf16")
    assert swapq.is_converted(model)
    assert swapq.recipe_of(model).name == "bf16"
    assert torch.equal(model(prompts()).logits, expected)


def test_a_second_conversion_is_refused() -> None:
    with pytest.raises(swapq.SwapqError, match="converted already"):
        swapq.convert(converted(), "mxfp8-rl")


@pytest.mark.parametrize("model", ["a/folder", None, [1]])
def test_what_is_no_model_is_refused_with_what_to_call_for_a_folder(model: object) -> None:
    with pytest.raises(swapq.SwapqError, match=r"convert takes a model, got .*convert_checkpoint"):
        swapq.convert(model, "nvfp4-rl")  # type: ignore[type-var]


def test_a_refused_plan_changes_nothing() -> None:
    model = qwen3_moe()
    classes = [type(m) for m in model.modules()]
    with pytest.raises(swapq.SwapqError):
        swapq.convert(model, "nvfp4-rl", keep_bf16=["no_such_name"])
    assert [type(m) for m in model.modules()] == classes
    assert not swapq.is_converted(model)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -3.4e38], ids=["NaN", "Inf", "too large for BF16"])
def test_a_weight_that_is_not_finite_is_refused_by_name_before_anything_changes(value: float) -> None:
    model = qwen3_moe()
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 2, 1] = value
    with pytest.raises(swapq.SwapqError, match=r"model\.layers\.1\.mlp\.experts\.down_proj.*1 of .*\(3, 2, 1\)"):
        swapq.convert(model, "nvfp4-rl", last_layers_bf16=0)
    assert not any(isinstance(m, SwapqExperts) for m in model.modules())


def test_a_wrapped_forward_is_refused() -> None:
    model = qwen3_moe()
    experts = model.model.layers[0].mlp.experts
    experts.forward = experts.forward
    with pytest.raises(swapq.SwapqError, match="forward is wrapped"):
        swapq.convert(model, "nvfp4-rl")


# What it computes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", MATCHED)
def test_every_family_trains_and_stays_close_to_bf16(family: str, recipe: str) -> None:
    model = FAMILIES[family]()
    expected = model(prompts()).logits
    converted(recipe, model)
    logits = model(prompts()).logits
    error = (logits - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.25
    grads = gradients(model)
    assert set(grads) == {name for name, p in model.named_parameters()}
    assert all(g.isfinite().all() for g in grads.values())


@pytest.mark.parametrize(("recipe", "backward"), RECIPES, ids=IDS)
def test_no_grad_inference_mode_train_and_eval_give_the_same_logits_in_any_order(recipe: str, backward: str) -> None:
    model = converted(recipe, backward=backward)
    expected = model(prompts()).logits.detach()
    with torch.inference_mode():
        assert torch.equal(model(prompts()).logits, expected)
    grads = gradients(model)
    with torch.no_grad():
        assert torch.equal(model.train()(prompts()).logits, expected)
    with torch.inference_mode():
        assert torch.equal(model.eval()(prompts()).logits, expected)
    assert same(gradients(model.train()), grads)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("recipe", "backward"), RECIPES, ids=IDS)
def test_gradient_checkpointing_gives_the_same_gradients(recipe: str, backward: str, reentrant: bool) -> None:
    model = converted(recipe, backward=backward).train()
    expected = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert same(gradients(model), expected)


def test_checkpointing_quantizes_again_in_the_recompute_and_once_when_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted("nvfp4-rl").train()
    weights = 2 * len(model.model.layers)
    with counted_weight_quantizations(monkeypatch) as calls:
        gradients(model)
        assert len(calls) == weights
        model.gradient_checkpointing_enable({"use_reentrant": False})
        calls.clear()
        gradients(model)
        assert len(calls) == 2 * weights
        calls.clear()
        with swapq.frozen_weights(model):
            gradients(model)
            gradients(model)
        assert len(calls) == weights


@pytest.mark.parametrize(("recipe", "backward"), RECIPES, ids=IDS)
def test_frozen_weights_change_no_bit_and_end_with_the_context(recipe: str, backward: str) -> None:
    model = converted(recipe, backward=backward)
    expected = gradients(model)
    with swapq.frozen_weights(model):
        with torch.inference_mode():
            model(prompts())
        assert same(gradients(model), expected)
        assert same(gradients(model), expected)
    with torch.no_grad():
        for p in model.parameters():
            p.data.mul_(1.5)  # `_version` does not see this
    fresh = converted(recipe, backward=backward)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(model(prompts()).logits, fresh(prompts()).logits)


def test_weights_changed_behind_autograds_back_are_seen_by_the_next_forward() -> None:
    model, other = converted(), qwen3_moe()
    with torch.no_grad():
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.mul_(100.0)
            p.data.copy_(q)
    assert torch.equal(model(prompts()).logits, converted(model=other)(prompts()).logits)


@pytest.mark.parametrize(("recipe", "backward"), RECIPES, ids=IDS)
def test_autocast_with_fp32_masters_equals_bf16_masters_in_the_expert_block(recipe: str, backward: str) -> None:
    model = converted(recipe, backward=backward)
    twin = converted(recipe, qwen3_moe().to(torch.bfloat16), backward=backward)
    block, other = model.model.layers[0].mlp.experts, twin.model.layers[0].mlp.experts
    x = torch.randn(9, 64).to(torch.bfloat16)
    index, weights = torch.randint(0, 8, (9, 2)), torch.rand(9, 2)
    with torch.autocast("cpu", torch.bfloat16):
        y = block(x, index, weights)
    assert torch.equal(y, other(x, index, weights))
    with torch.autocast("cpu", torch.bfloat16):
        grads = gradients(model)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads.values())


def test_gradients_accumulate() -> None:
    model = converted("mxfp8-rl")
    first, second = gradients(model, prompts()[:1]), gradients(model, prompts()[1:])
    model.zero_grad()
    for ids in (prompts()[:1], prompts()[1:]):
        model(ids, labels=ids).loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert torch.allclose(p.grad, first[name] + second[name], rtol=1e-6, atol=1e-9)


def test_an_expert_without_tokens_gets_a_gradient_of_exact_zeros() -> None:
    for recipe, backward in RECIPES:
        experts = converted(recipe, backward=backward).model.layers[0].mlp.experts
        x = torch.randn(5, 64).to(torch.bfloat16).requires_grad_()
        experts(x, torch.tensor([[0, 3]] * 5), torch.rand(5, 2)).float().square().sum().backward()
        for p in experts.parameters():
            assert p.grad is not None
            for expert in range(8):
                assert (p.grad[expert].count_nonzero() == 0) == (expert not in (0, 3))


def test_tokens_are_quantized_once_before_they_are_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    from swapq.nn import functional

    seen: list[int] = []
    real = functional.row_parts
    monkeypatch.setattr(functional, "row_parts", lambda x, *a: (seen.append(x.shape[0]), real(x, *a))[1])
    experts = converted().model.layers[0].mlp.experts
    experts(torch.randn(7, 64), torch.randint(0, 8, (7, 2)), torch.rand(7, 2))
    assert seen == [7, 14]  # tokens for gate and up; routed rows, each of its own expert, for down


@pytest.mark.parametrize(("recipe", "backward"), RECIPES, ids=IDS)
def test_compile_gives_the_same_logits_and_gradients(recipe: str, backward: str) -> None:
    model = converted(recipe, backward=backward)
    expected = gradients(model)
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(compiled(prompts()).logits, model(prompts()).logits)
    for name, grad in gradients(compiled).items():
        plain = expected[name.removeprefix("_orig_mod.")]
        assert torch.allclose(grad, plain, rtol=1e-5, atol=1e-7), name


def test_deepcopy_is_independent_and_equal() -> None:
    for recipe, backward in RECIPES:
        model = converted(recipe, backward=backward)
        twin = copy.deepcopy(model)
        assert torch.equal(twin(prompts()).logits, model(prompts()).logits)
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(2)
        assert swapq.digest(twin) != swapq.digest(model)
        assert swapq.recipe_of(twin) == swapq.recipe_of(model)


# Training in BF16 beside a quantized rollout


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_rollout_trains_as_the_plain_model_does_and_serves_what_fp8_block_serves(family: str) -> None:
    plain, model = FAMILIES[family](), converted("fp8-rollout", FAMILIES[family]())
    assert torch.equal(model(prompts()).logits, plain(prompts()).logits)
    expected = gradients(plain)
    for name, grad in gradients(model).items():
        assert torch.equal(grad, expected[name]), name
    assert not swapq.recipe_of(model).matched
    if family != "gpt_oss":
        assert swapq.digest(model) == swapq.digest(converted("fp8-block-rl", FAMILIES[family]()))


def test_fp8_rollout_without_masters_is_the_policy_of_the_rollout() -> None:
    held, matched = converted("fp8-rollout", trainable=False), converted("fp8-block-rl")
    assert torch.equal(held(prompts()).logits, matched(prompts()).logits)
    assert not torch.equal(held(prompts()).logits, qwen3_moe()(prompts()).logits)


# Codes only


@pytest.mark.parametrize("recipe", MATCHED)
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gpt_oss"])
def test_codes_only_computes_the_same_bits(recipe: str, family: str) -> None:
    model, held = converted(recipe, FAMILIES[family]()), converted(recipe, FAMILIES[family](), trainable=False)
    assert torch.equal(held(prompts()).logits, model(prompts()).logits)
    assert swapq.digest(held) == swapq.digest(model)


@pytest.mark.parametrize(("recipe", "bits"), [("nvfp4-rl", 4.5), ("mxfp8-rl", 8.25), ("int4-qat", 4.5)])
def test_codes_only_holds_codes_and_scales_and_no_master(recipe: str, bits: float) -> None:
    model = converted(recipe, trainable=False)
    experts = model.model.layers[0].mlp.experts
    assert not any(p.requires_grad for p in experts.parameters())
    elements = 8 * (2 * 32 * 64 + 64 * 32)
    held = sum(p.numel() * p.element_size() for p in experts.parameters())
    scale_2 = 8 * 4 * 2 if recipe == "nvfp4-rl" else 0
    assert held == elements * bits / 8 + scale_2


@pytest.mark.parametrize("recipe", MATCHED)
@pytest.mark.parametrize(
    "cast",
    [lambda m: m.to(torch.float16), nn.Module.half, nn.Module.bfloat16, nn.Module.float, nn.Module.double],
    ids=["to", "half", "bfloat16", "float", "double"],
)
def test_no_cast_touches_codes_or_scales(recipe: str, cast: object) -> None:
    model = converted(recipe, trainable=False)
    before = {k: v for k, v in swapq.digest(model).items() if "experts" in k}
    cast(model)  # type: ignore[operator]
    assert {k: v for k, v in swapq.digest(model).items() if "experts" in k} == before
    assert next(model.model.norm.parameters()).dtype != torch.uint8


def test_codes_only_moves_between_devices() -> None:
    model = converted(trainable=False)
    experts = model.model.layers[0].mlp.experts
    shapes = {name: (p.shape, p.dtype) for name, p in experts.named_parameters()}
    experts.to("meta")
    assert all(p.is_meta for p in experts.parameters())
    assert {name: (p.shape, p.dtype) for name, p in experts.named_parameters()} == shapes


def test_a_linear_that_holds_codes_still_tells_dtype_shape_and_device_of_its_weight() -> None:
    linear = converted("mxfp8-rl", trainable=False).model.layers[0].self_attn.q_proj
    assert isinstance(linear, SwapqLinear)
    assert linear.weight.shape == (64, 64)
    assert linear.weight.dtype == torch.bfloat16
    assert linear.weight.device.type == "cpu"


# Remote code: a ModuleList of linears


def test_gate_and_up_of_linear_experts_share_one_scale() -> None:
    model = listed_experts()
    with torch.no_grad():
        for layer in model.model.layers:
            for expert in layer.mlp.experts:
                expert.up_proj.weight.mul_(8)
    x = torch.randn(20, 64)
    expected = model.model.layers[0].mlp.experts[0](x)
    swapq.convert(model, "nvfp4-rl", last_layers_bf16=0)
    tensors = dict(checkpoint_tensors(model))
    for expert in range(4):
        prefix = f"model.layers.0.mlp.experts.{expert}"
        assert torch.equal(tensors[f"{prefix}.gate_proj.weight_scale_2"], tensors[f"{prefix}.up_proj.weight_scale_2"])
    error = (model.model.layers[0].mlp.experts[0](x) - expected).norm() / expected.norm()
    assert 1e-3 < error < 0.3
    assert all(g.isfinite().all() for g in gradients(model).values())
