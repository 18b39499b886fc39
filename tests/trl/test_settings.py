"""The trainers work with TRL's other settings as TRL's own do."""

from pathlib import Path
from typing import Any

import pytest

from swapq.errors import UnsupportedError
from tests.helpers.mixed import mixed
from tests.trl.conftest import Job


def steps(result: dict[str, Any]) -> list[int]:
    return [row["step"] for row in result["history"] if "reward" in row]


COMPILED = pytest.param({}, id="compiled", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[COMPILED, pytest.param({"enforce_eager": True}, id="eager")])
def rloo(request: pytest.FixtureRequest, job: Job) -> dict[str, Any]:
    """RLOO with gradient accumulation and evaluation; the slow one on the compiled engine that TRL starts by default."""
    arguments = {"gradient_accumulation_steps": 2, "evaluate": True, "steps": 2, "engine_options": request.param}
    return job("options", kind="RLOO", recipe="nvfp4-rl", **arguments)


@pytest.mark.vllm
def test_gradient_accumulation_syncs_once_a_step_and_logs_once_a_step(rloo: dict[str, Any]) -> None:
    assert rloo["syncs"] == [
        0,
        1,
        2,
    ]  # after each step the evaluation needs the new weights, the next step finds them there
    assert steps(rloo) == [1, 2]
    assert all("swapq/sync_seconds" in row for row in rloo["history"] if "reward" in row)


@pytest.mark.vllm
def test_rloo_is_a_drop_in_too(rloo: dict[str, Any]) -> None:
    for row in rloo["history"]:
        if "reward" in row:
            assert 0 < row["swapq/mismatch_abs_mean"] < 0.15
            assert row["swapq/sync_tensors_verified"] > 50


@pytest.mark.vllm
def test_evaluation_uses_the_synced_engine_and_logs_its_own_mismatch(rloo: dict[str, Any]) -> None:
    evaluations = [row for row in rloo["history"] if "eval_reward" in row]
    assert len(evaluations) == 2
    assert all(0 < row["eval_swapq/mismatch_abs_mean"] < 0.15 for row in evaluations)


@pytest.fixture(scope="module")
def iterations(job: Job) -> dict[str, Any]:
    """Two iterations over each of two batches, without TRL's correction of the mismatch."""
    arguments = {"num_iterations": 2, "vllm_importance_sampling_correction": False, "steps": 4}
    return job("options", kind="GRPO", recipe="mxfp8-rl", **arguments)


@pytest.mark.vllm
def test_several_iterations_over_one_batch_sync_and_log_only_when_something_is_generated(
    iterations: dict[str, Any],
) -> None:
    assert iterations["syncs"] == [0, 2]
    assert [row["step"] for row in iterations["history"] if "swapq/sync_seconds" in row] == [1, 3]


@pytest.mark.vllm
def test_without_the_correction_the_mismatch_is_still_logged(iterations: dict[str, Any]) -> None:
    generated = [row for row in iterations["history"] if "swapq/mismatch_abs_mean" in row]
    assert len(generated) == 2
    for row in generated:
        assert 0 < row["swapq/mismatch_abs_mean"] < 0.15
        assert row["swapq/mismatch_masked_fraction"] == 0
        assert not any(name.startswith("sampling/") for name in row)


@pytest.mark.vllm
def test_a_recipe_of_two_formats_trains_with_verified_syncs(job: Job) -> None:
    result = job("options", kind="GRPO", recipe=mixed(last_layers_bf16=0).to_dict(), steps=2)
    assert result["sync"]["error"] is None
    assert steps(result) == [1, 2]
    for row in result["history"]:
        assert 0 < row["swapq/mismatch_abs_mean"] < 0.15
        assert row["swapq/sync_tensors_verified"] == 173  # codes and scales of both formats, and what stays


@pytest.mark.vllm
def test_a_model_that_is_not_converted_trains_with_a_sync_that_works_on_a_cpu(job: Job) -> None:
    result = job("options", kind="GRPO", recipe="", steps=2)
    assert steps(result) == [1, 2]
    for row in result["history"]:
        assert 0 < row["swapq/mismatch_abs_mean"] < 0.15
        assert row["swapq/sync_tensors_verified"] > 0


def test_without_vllm_the_trainer_is_trls_own_and_its_reference_follows_the_policys_recipe(
    job: Job, tmp_path: Path
) -> None:
    arguments = {"beta": 0.1, "steps": 2, "output_dir": str(tmp_path), "use_vllm": False}
    result = job("options", kind="GRPO", recipe="nvfp4-rl", **arguments)
    first, second = result["history"]
    assert result["sync"]["error"] == "SyncError"
    assert not any(name.startswith("swapq/") for name in first)
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert second["kl"] > 1e-4


def test_an_engine_option_that_would_change_the_policy_is_refused() -> None:
    from swapq_trl import VLLMGeneration

    with pytest.raises(UnsupportedError, match="engine_options: logprobs_mode, quantization cannot be chosen"):
        VLLMGeneration(None, None, engine_options={"quantization": "fp8", "logprobs_mode": "raw_logprobs"})
