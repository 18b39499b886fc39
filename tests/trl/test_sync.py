"""A weight sync is a transaction: what the engine holds afterwards is what was sent, or the run stops with the names."""

from typing import Any

import pytest

import swapq
from swapq.diagnostics import running
from swapq.errors import SyncError
from tests.trl.conftest import Job
from tests.trl.jobs import tiny

# On a random model with large experts rounding flips many 4-bit codes; a stale or wrong engine is at 0.3 and more.
ROUNDING = {"bf16": 0.03, "mxfp8-rl": 0.05, "nvfp4-rl": 0.15, "fp8-block-rl": 0.05, "int4-qat": 0.03}


@pytest.fixture(scope="module", params=ROUNDING)
def trained(request: pytest.FixtureRequest, job: Job) -> dict[str, Any]:
    """Two GRPO steps and four syncs on one engine."""
    return {"recipe": request.param, **job("train", recipe=request.param)}


@pytest.fixture(scope="module")
def faulty(job: Job) -> dict[str, Any]:
    """Faults, one after the other, on one engine of nvfp4-rl."""
    return job("faults", recipe="nvfp4-rl")


@pytest.mark.vllm
def test_the_engine_starts_from_the_trainers_own_bytes(trained: dict[str, Any]) -> None:
    assert trained["start_equal"]
    assert trained["start_count"] > 50
    assert trained["left_in_tmp"] == []


@pytest.mark.vllm
def test_after_each_step_the_engine_holds_the_converted_weights(trained: dict[str, Any]) -> None:
    assert trained["equal_at_sync"] == [True, True, True]
    assert trained["last_loaded"]


@pytest.mark.vllm
def test_every_tensor_of_every_sync_is_verified(trained: dict[str, Any]) -> None:
    seconds, size, tensors, verified = trained["report"]
    assert verified == tensors == trained["start_count"]
    assert size == trained["expected_bytes"]
    assert seconds > 0
    for row in trained["history"]:
        assert row["swapq/sync_tensors_verified"] == tensors
        assert row["swapq/sync_bytes"] == size
        assert row["swapq/sync_seconds"] > 0


@pytest.mark.vllm
def test_four_syncs_whose_last_equals_the_first_give_identical_log_probabilities(trained: dict[str, Any]) -> None:
    assert trained["changed_between"]
    assert trained["fourth_equals_first"]


@pytest.mark.vllm
def test_syncs_move_no_tensor_and_keep_memory_flat(trained: dict[str, Any]) -> None:
    assert not trained["moved"]
    assert max(trained["memory"]) - trained["memory"][0] < 32 * 2**20


@pytest.mark.vllm
def test_the_mismatch_is_logged_each_step_and_is_rounding_only(trained: dict[str, Any]) -> None:
    assert [row["step"] for row in trained["history"]] == [1, 2]
    for row in trained["history"]:
        assert row["grad_norm"] > 0
        assert 0 < row["swapq/mismatch_abs_mean"] < ROUNDING[trained["recipe"]]
        assert row["swapq/mismatch_abs_mean"] <= row["swapq/mismatch_abs_max"] < 1
        assert row["swapq/mismatch_abs_mean"] == pytest.approx(row["sampling/sampling_logp_difference/mean"], rel=1e-3)
        assert abs(row["swapq/mismatch_k1"]) < 0.05
        assert 0 <= row["swapq/mismatch_k3"] < 0.03
        assert 0.9 < row["swapq/mismatch_ess"] <= 1
        assert row["swapq/mismatch_masked_fraction"] == 0


@pytest.mark.vllm
def test_the_first_sync_after_resuming_sends_the_checkpoints_weights(trained: dict[str, Any]) -> None:
    assert trained["resumed"] == {"before": False, "syncs": [[2, True, True]], "step": 3}


def test_an_engine_that_quantizes_other_rows_than_the_trainer_is_refused_by_name() -> None:
    from swapq_trl.generation import _require_same_formats

    model = swapq.convert(tiny(), "nvfp4-rl", last_layers_bf16=0)
    engine: dict[str, tuple[str, str]] = dict(running(model))
    _require_same_formats(model, engine)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    with pytest.raises(
        SyncError, match=f"{name} runs as nvfp4 with nvfp4 rows in the trainer and as nvfp4 with bf16 rows"
    ):
        _require_same_formats(model, engine | {name: ("nvfp4", "bf16")})


@pytest.mark.vllm
def test_the_trainer_keeps_trls_name_and_adds_a_tag(trained: dict[str, Any]) -> None:
    assert trained["name"] == "GRPOTrainer"
    assert {"trl", "grpo", "swapq"} <= set(trained["tags"])


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("drop", "model.layers.1.mlp.experts.down_proj.weight"),
        ("rename", "model.layers.1.mlp.experts.down_proj.weightx"),
        ("unquantized", "model.layers.1.mlp.experts.down_proj.weight"),
        ("broken", "the quantizer failed"),
        ("flip", "model.layers.1.mlp.experts.down_proj.weight"),
        ("nan", "model.layers.0.mlp.experts"),
    ],
)
def test_a_fault_in_a_sync_is_an_error_that_names_it(faulty: dict[str, Any], fault: str, named: str) -> None:
    assert faulty[fault]["error"] == "SyncError"
    assert named in faulty[fault]["message"]


@pytest.mark.vllm
@pytest.mark.parametrize("fault", ["drop", "rename", "unquantized", "broken", "flip"])
def test_after_a_failed_sync_nothing_is_generated(faulty: dict[str, Any], fault: str) -> None:
    assert faulty[fault]["generates"]["error"] == "SyncError"


@pytest.mark.vllm
@pytest.mark.parametrize("fault", ["drop", "rename", "unquantized", "broken"])
def test_a_whole_sync_after_a_failed_one_heals_the_engine(faulty: dict[str, Any], fault: str) -> None:
    assert faulty[fault]["healed"]


@pytest.mark.vllm
def test_a_fault_in_a_sync_stops_the_training(faulty: dict[str, Any]) -> None:
    assert faulty["train"]["error"] == "SyncError"
    assert faulty["train"]["steps"] == 0


@pytest.mark.vllm
def test_the_self_test_notices_an_engine_that_changes_under_equal_weights(faulty: dict[str, Any]) -> None:
    result = faulty["self_test"]
    assert result["since_start"]["error"] == result["noticed"]["error"] == "SyncError"
    assert "the weights the engine was built from" in result["since_start"]["message"]
    assert result["sent_again"] == result["since_start"]
    assert "the same weights were sent twice" in result["noticed"]["message"]
    assert result["refused"]["error"] == "SyncError"
