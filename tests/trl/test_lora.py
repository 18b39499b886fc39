"""LoRA: merged exactly where the recipe leaves a linear in BF16, refused with the reason where it cannot be exact."""

import pytest

from tests.trl.conftest import Job

pytestmark = pytest.mark.vllm


def test_lora_on_bf16_attention_is_served_merged_and_leaves_the_masters_alone(job: Job) -> None:
    result = job("lora", recipe="nvfp4-rl", targets=["q_proj", "v_proj"])
    assert result["served_equals_merged"]
    assert result["masters_unchanged"]
    assert result["verified"] == result["tensors"]
    assert result["codes_changed"] is None
    assert all(0 < row["swapq/mismatch_abs_mean"] < 0.05 for row in result["history"])


def test_lora_on_a_quantized_linear_is_refused_with_the_way_out(job: Job) -> None:
    result = job("lora", recipe="mxfp8-rl", targets=["q_proj"])
    assert "q_proj" in result["refused"]
    assert "keep_bf16" in result["refused"]
    assert "approximate_lora" in result["refused"]


def test_lora_on_a_quantized_linear_can_be_allowed_and_says_what_is_lost(job: Job) -> None:
    result = job("lora", recipe="mxfp8-rl", targets=["q_proj"], approximate=True)
    assert result["served_equals_merged"]
    assert result["masters_unchanged"]
    assert 0 < result["codes_changed"] < 1
    assert result["history"][0]["swapq/lora_codes_changed"] == 0  # an adapter starts as zero


def test_lora_on_quantized_experts_is_refused(job: Job) -> None:
    result = job("lora", recipe="nvfp4-rl", targets=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    assert "experts" in result["refused"]
    assert "target_parameters" in result["refused"]
