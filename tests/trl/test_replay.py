"""Experts that the engine returns travel with their tokens to every forward of the policy."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from swapq.errors import SwapqError, UnsupportedError
from swapq_trl.replay import RoutedSequence, padded
from tests.trl.conftest import Job


def output(prompt: list[int], sampled: list[int], experts: np.ndarray | None) -> Any:
    completion = SimpleNamespace(token_ids=sampled, routed_experts=experts)
    return SimpleNamespace(request_id="7", prompt_token_ids=prompt, outputs=[completion])


def routed(prompt: list[int], sampled: list[int], most: int = 8) -> RoutedSequence:
    rows = len(prompt) + len(sampled) - 1
    experts = np.arange(rows * 4).reshape(rows, 2, 2) % most
    return RoutedSequence.of(output(prompt, sampled, experts.astype(np.uint16)))


def test_experts_lie_where_their_tokens_lie_and_nowhere_else() -> None:
    sequences = [routed([5, 6, 7], [8]), routed([9], [3, 4])]
    ids = torch.tensor([[5, 6, 7, 8, 0], [0, 0, 9, 3, 4]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]])
    experts = padded(sequences, ids, mask, completion=2)
    assert experts.dtype == torch.int8
    assert torch.equal(experts[0, :3], sequences[0].experts)
    assert torch.equal(experts[1, 2:4], sequences[1].experts)
    assert (experts[0, 3:] == -1).all()
    assert (experts[1, :2] == -1).all()
    assert (experts[1, 4] == -1).all()


def test_many_experts_need_two_bytes_and_a_masked_sequence_has_no_record() -> None:
    sequences = [routed([5, 6, 7] * 30, [8], most=300), routed([5, 6, 7] * 30, [8])]
    ids = torch.tensor([sequence.ids for sequence in sequences])
    mask = torch.stack([torch.ones(91), torch.zeros(91)]).long()
    experts = padded(sequences, ids, mask, completion=1)
    assert experts.dtype == torch.int16
    assert experts.max() == 299
    assert (experts[1] == -1).all()


def test_a_batch_that_is_not_the_generated_one_is_an_error() -> None:
    sequences = [routed([5, 6], [8]), routed([6, 5], [8])]
    ids, mask = torch.tensor([[6, 5, 8], [5, 6, 8]]), torch.ones(2, 3)
    with pytest.raises(SwapqError, match="row 0 of the batch does not hold the 3 tokens"):
        padded(sequences, ids, mask, completion=1)
    with pytest.raises(SwapqError, match="has 1 sequences, the engine's last call generated 2"):
        padded(sequences, ids[:1], mask[:1], completion=1)


NOTHING: dict[str, tuple[np.ndarray | None, type[SwapqError], str]] = {
    "none": (None, UnsupportedError, "request 7 came back without routed_experts"),
    "rows": (
        np.ones((4, 2, 2)),
        SwapqError,
        r"2 \+ 2 tokens, so experts are expected as \[3, layers, top_k\].* \[4, 2, 2\]",
    ),
    "zeros": (np.zeros((3, 2, 2), np.uint8), UnsupportedError, "expert 0 for every token and layer of request 7"),
}


@pytest.mark.parametrize("kind", NOTHING)
def test_an_engine_that_does_not_say_what_it_chose_is_an_error(kind: str) -> None:
    experts, error, message = NOTHING[kind]
    with pytest.raises(error, match=message):
        RoutedSequence.of(output([1, 2], [3, 4], experts))


BATCHES: dict[str, dict[str, Any]] = {
    "scored before the loss": {"steps": 8, "steps_per_generation": 2, "num_iterations": 2},
    "scored in the loss": {"steps": 2, "steps_per_generation": 1, "vllm_importance_sampling_correction": False},
}


@pytest.mark.vllm
@pytest.mark.parametrize("case", BATCHES)
def test_every_forward_of_the_policy_gets_each_tokens_own_experts(job: Job, case: str) -> None:
    """Over shuffled, split and reused batches and recomputed layers; the engine's answer is a function of token and position."""
    result = job("replay_jobs.marked_tokens", **BATCHES[case])
    assert result["asked"]
    assert result["wrong"] == []
    assert result["forwards"] >= 4
    assert result["recomputed"] >= 4
    assert result["own"] > 0  # positions without a record: padding and the last token
    assert result["reference_forwards"] > 0
    assert result["reference_replayed"] == 0
    generated = [row for row in result["history"] if "swapq/replay_changed_fraction" in row]
    assert len(generated) == 2
    assert all(0.5 < row["swapq/replay_changed_fraction"] <= 1 for row in generated)


@pytest.mark.vllm
@pytest.mark.parametrize("recipe", ["nvfp4-rl", ""])
def test_a_trainers_own_experts_replayed_leave_the_mismatch_as_it_is(job: Job, recipe: str) -> None:
    result = job("replay_jobs.own_choices", recipe=recipe)
    for row in result["history"]:
        assert row["swapq/replay_changed_fraction"] < 0.05
        assert 0 < row["swapq/mismatch_abs_mean"] < 0.15


@pytest.mark.vllm
def test_on_near_ties_the_engines_own_choices_replayed_bring_trainer_and_engine_closer(job: Job) -> None:
    figures = []
    for replay in (False, True):
        (row,) = job("replay_jobs.engines_choices", replay_routing=replay)["history"]
        figures.append((row["swapq/mismatch_abs_mean"], row["swapq/mismatch_k3"]))
    print(
        f"\nmismatch without and with replay: {figures[0][0]:.4f}, {figures[1][0]:.4f}; k3 {figures[0][1]:.5f}, {figures[1][1]:.5f}"
    )
    assert 0.02 < row["swapq/replay_changed_fraction"] < 0.3
    assert figures[1][0] < 0.8 * figures[0][0]
    assert figures[1][1] < 0.5 * figures[0][1]


@pytest.mark.vllm
def test_without_the_option_nothing_is_asked_of_the_engine_and_nothing_travels(job: Job) -> None:
    result = job("replay_jobs.own_choices", recipe="", replay_routing=False)
    assert not result["asked"]
    assert not result["travels"]
    assert not any("replay" in name for row in result["history"] for name in row)


@pytest.mark.vllm
def test_what_cannot_be_replayed_is_refused_before_an_engine_is_built(job: Job) -> None:
    result = job("replay_jobs.refused")
    expected = {
        "cpu": "the engine was not built with enable_return_routed_experts=True",
        "no engine": "built with use_vllm=False",
        "server": "vllm_mode='server'",
        "rollouts": "replay_routing=True with rollout_func",
        "adapter": "with beta=0.1 and an adapter",
    }
    for name, message in expected.items():
        assert result[name]["error"] == "UnsupportedError", (name, result[name])
        assert message in result[name]["message"]
