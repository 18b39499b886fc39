"""LoRA: merged exactly where the recipe leaves a linear in BF16, refused with the reason where it cannot be exact."""

from typing import Any

import peft
import pytest
import torch

import swapq
from swapq.errors import UnsupportedError
from swapq_trl.adapters import Merge, check_adapters, merged
from tests.trl.conftest import Job
from tests.trl.jobs import tiny


def adapted(recipe: str, config: peft.PeftConfig | None = None, **settings: Any) -> Any:
    """A converted tiny model with an adapter."""
    model = swapq.convert(tiny(), recipe, **({"last_layers_bf16": 0} if recipe == "nvfp4-rl" else {}))
    return peft.get_peft_model(model, config or peft.LoraConfig(task_type="CAUSAL_LM", r=4, **settings))


def grow(model: Any, size: float) -> None:
    """Make an adapter, which starts as zero, do something."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.vllm
def test_lora_on_bf16_attention_is_served_merged_and_leaves_the_masters_alone(job: Job) -> None:
    result = job("lora", recipe="nvfp4-rl", targets=["q_proj", "v_proj"])
    assert result["served_equals_merged"]
    assert result["masters_unchanged"]
    assert result["left_alone_by_a_failed_sync"]
    assert result["verified"] == result["tensors"]
    assert result["codes_changed"] is None
    assert all(0 < row["swapq/mismatch_abs_mean"] < 0.15 for row in result["history"])


@pytest.mark.vllm
def test_lora_on_a_quantized_linear_can_be_allowed_and_says_what_is_lost(job: Job) -> None:
    result = job("lora", recipe="mxfp8-rl", targets=["q_proj"], approximate=True)
    assert result["served_equals_merged"]
    assert result["masters_unchanged"]
    assert 0 < result["codes_changed"] < 1
    assert result["history"][0]["swapq/lora_codes_changed"] == 0  # an adapter starts as zero
    said = f"the adapters change {100 * result['codes_changed']:.2f} % of the codes"
    assert any(said in warning for warning in result["warnings"])


def test_lora_on_a_quantized_linear_is_refused_with_the_ways_out() -> None:
    model = adapted("mxfp8-rl", target_modules=["q_proj"])
    with pytest.raises(
        UnsupportedError, match=r"q_proj: LoRA on a linear that the recipe quantizes.*keep_bf16.*approximate_lora"
    ):
        check_adapters(model)
    check_adapters(model, approximate=True)


def test_lora_on_quantized_experts_is_refused() -> None:
    model = adapted("nvfp4-rl", target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(UnsupportedError, match=r"experts.*target_parameters"):
        check_adapters(model, approximate=True)


def test_adapters_that_cannot_be_merged_are_refused() -> None:
    virtual = adapted("nvfp4-rl", peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(UnsupportedError, match="virtual tokens"):
        check_adapters(virtual)
    scaled = adapted(
        "nvfp4-rl", peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])
    )
    with pytest.raises(UnsupportedError, match="use LoRA"):
        check_adapters(scaled)


def test_adapters_on_a_sharded_model_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="DDP"):
        check_adapters(adapted("nvfp4-rl", target_modules=["q_proj"]), sharded=True)


def test_a_model_without_adapters_is_always_accepted() -> None:
    check_adapters(swapq.convert(tiny(), "mxfp8-rl"), sharded=True)


def test_merging_is_undone_bit_for_bit_however_often_and_after_an_error() -> None:
    model = adapted("nvfp4-rl", target_modules=["q_proj", "o_proj"], lora_alpha=64)
    model.to(torch.bfloat16)  # where adding and subtracting an adapter would drift
    grow(model, 0.3)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    modules = [name for name, _ in model.named_modules()]
    for _ in range(20):
        with merged(model) as plain:
            assert not [name for name, _ in plain.named_parameters() if "lora" in name or "base_layer" in name]
            assert not torch.equal(plain.model.layers[0].self_attn.q_proj.weight, before[Q])
    with pytest.raises(RuntimeError, match="interrupted"), merged(model):
        raise RuntimeError("interrupted")
    assert modules == [name for name, _ in model.named_modules()]
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


Q = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"


def test_the_fraction_of_changed_codes_grows_with_the_adapter() -> None:
    model = adapted("mxfp8-rl", target_modules=["q_proj"])
    fractions = []
    for size in (0.0, 1e-4, 1e-1):
        grow(model, size)
        found = Merge()
        with merged(model, found):
            pass
        fractions.append(found.changed_fraction)
    assert fractions[0] == 0
    assert fractions[0] < fractions[1] < fractions[2]


def test_trained_copies_of_modules_to_save_are_what_is_sent() -> None:
    model = adapted("nvfp4-rl", target_modules=["q_proj"], modules_to_save=["norm"])
    with torch.no_grad():
        model.get_base_model().model.norm.modules_to_save["default"].weight.fill_(7.0)
    with merged(model) as plain:
        assert plain.model.norm.weight.eq(7.0).all()
