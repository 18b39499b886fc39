"""What only a CUDA device can show: the compiled engine, and sleep mode, whose engine loses its weights between steps."""

import pytest

from tests.trl.conftest import Job

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8-rl", "nvfp4-rl"])
def test_training_on_a_gpu_verifies_every_sync(job: Job, recipe: str) -> None:
    result = job("options", kind="GRPO", recipe=recipe, steps=3, engine_options={})
    for row in result["history"]:
        assert row["swapq/sync_tensors_verified"] > 50
        assert 0 < row["swapq/mismatch_abs_mean"] < 0.2


def test_in_sleep_mode_the_engine_gets_its_weights_back_at_each_generation(job: Job) -> None:
    arguments = {"vllm_enable_sleep_mode": True, "num_iterations": 2, "steps": 4, "engine_options": {}}
    result = job("options", kind="GRPO", recipe="nvfp4-rl", **arguments)
    rows = [row for row in result["history"] if "swapq/mismatch_abs_mean" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["swapq/sync_tensors_verified"] > 50
        assert row["swapq/mismatch_abs_mean"] < 0.2
