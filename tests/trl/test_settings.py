"""The trainers work with TRL's other settings as TRL's own do."""

from typing import Any

import pytest

from tests.trl.conftest import Job

pytestmark = pytest.mark.vllm


def steps(result: dict[str, Any]) -> list[int]:
    return [row["step"] for row in result["history"] if "reward" in row]


def test_gradient_accumulation_syncs_once_a_step_and_logs_once_a_step(job: Job) -> None:
    result = job("options", kind="GRPO", recipe="nvfp4-rl", gradient_accumulation_steps=2, steps=2)
    assert result["syncs"] == [0, 1]
    assert steps(result) == [1, 2]
    assert all("swapq/mismatch_abs_mean" in row and "swapq/sync_seconds" in row for row in result["history"])


def test_several_iterations_over_one_batch_sync_only_when_something_is_generated(job: Job) -> None:
    result = job("options", kind="GRPO", recipe="mxfp8-rl", num_iterations=2, steps=4)
    assert result["syncs"] == [0, 2]
    assert ["swapq/sync_seconds" in row for row in result["history"]] == [True, False, True, False]


def test_evaluation_uses_the_synced_engine_and_logs_its_own_mismatch(job: Job) -> None:
    result = job("options", kind="GRPO", recipe="bf16", evaluate=True, steps=2)
    evaluations = [row for row in result["history"] if "eval_reward" in row]
    assert len(evaluations) == 2
    assert all(0 < row["eval_swapq/mismatch_abs_mean"] < 0.05 for row in evaluations)


def test_without_the_correction_the_mismatch_is_still_logged(job: Job) -> None:
    result = job("options", kind="GRPO", recipe="nvfp4-rl", vllm_importance_sampling_correction=False, steps=1)
    (row,) = result["history"]
    assert 0 < row["swapq/mismatch_abs_mean"] < 0.05
    assert row["swapq/mismatch_masked_fraction"] == 0
    assert not any(name.startswith("sampling/") for name in row)


def test_rloo_is_a_drop_in_too(job: Job) -> None:
    result = job("options", kind="RLOO", recipe="nvfp4-rl", steps=2)
    assert steps(result) == [1, 2]
    for row in result["history"]:
        assert 0 < row["swapq/mismatch_abs_mean"] < 0.05
        assert row["swapq/sync_tensors_verified"] > 50


def test_a_model_that_is_not_converted_trains_with_a_sync_that_works_on_a_cpu(job: Job) -> None:
    result = job("options", kind="GRPO", recipe="", steps=2)
    assert steps(result) == [1, 2]
    for row in result["history"]:
        assert 0 < row["swapq/mismatch_abs_mean"] < 0.02
        assert row["swapq/sync_tensors_verified"] > 0


def test_without_vllm_the_trainer_is_trls_own(job: Job) -> None:
    result = job("options", kind="GRPO", recipe="nvfp4-rl", use_vllm=False, steps=1)
    assert steps(result) == [1]
    assert result["sync"]["error"] == "SyncError"
    assert not any(name.startswith("swapq/") for name in result["history"][0])
