"""Two policies on purpose are allowed and named in every step; what is not for rollouts starts no engine."""

from typing import Any

import pytest

from tests.trl.conftest import Job

RECIPES = ("fp8-block-rl", "fp8-rollout")
each = pytest.mark.parametrize("recipe", RECIPES)


@pytest.fixture(scope="module")
def runs(job: Job) -> dict[str, list[dict[str, Any]]]:
    """Rows of eight GRPO steps of each recipe, with a BF16 reference to look at."""
    settings = {"steps": 8, "learning_rate": 1e-4, "watch_reference": True}
    return {recipe: rows(job("options", kind="GRPO", recipe=recipe, **settings)) for recipe in RECIPES}


def rows(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in run["history"] if "reward" in row]


@each
@pytest.mark.vllm
def test_every_step_says_whether_both_sides_are_one_policy(runs: dict[str, list[dict[str, Any]]], recipe: str) -> None:
    assert [row["swapq/one_policy"] for row in runs[recipe]] == [float(recipe == "fp8-block-rl")] * 8
    assert all(row["swapq/sync_tensors_verified"] > 50 for row in runs[recipe])


@each
@pytest.mark.vllm
def test_the_reference_kl_is_logged_and_starts_at_what_quantizing_costs(
    runs: dict[str, list[dict[str, Any]]], recipe: str
) -> None:
    first = runs[recipe][0]
    if recipe == "fp8-rollout":  # the trainer's policy is BF16 at the start, in autocast's rounding
        assert first["swapq/reference_kl_k3"] < 1e-3
    else:
        assert 0 < first["swapq/reference_kl_k3"] < 0.05
    assert all(row["swapq/reference_kl_k3"] >= 0 for row in runs[recipe])
    assert all("kl" not in row for row in runs[recipe]), "it is no penalty: TRL has no reference"


@each
@pytest.mark.vllm
def test_the_gradient_norm_is_compared_with_its_recent_median(
    runs: dict[str, list[dict[str, Any]]], recipe: str
) -> None:
    ratios = [row.get("swapq/grad_norm_ratio") for row in runs[recipe]]
    assert ratios[:5] == [None] * 5
    assert all(ratio > 0 for ratio in ratios[5:])


@pytest.mark.vllm
def test_two_policies_mismatch_more_than_one(runs: dict[str, list[dict[str, Any]]]) -> None:
    means = {recipe: sum(row["swapq/mismatch_abs_mean"] for row in found) / 8 for recipe, found in runs.items()}
    assert means["fp8-rollout"] > 1.5 * means["fp8-block-rl"], means


@pytest.mark.vllm
def test_what_is_not_for_rollouts_starts_no_engine(job: Job) -> None:
    result = job("refused", recipe="nvfp4-pretrain")
    assert result["error"] == "RecipeError"
    assert "an engine samples for the trainer" in result["message"]
    assert "depends on its neighbours" in result["message"]
