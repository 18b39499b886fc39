"""The mismatch figures are what their names say, whatever the batch looks like."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swapq.diagnostics import MismatchSums, measure_mismatch
from swapq.errors import SwapqError


def logps(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def test_equal_log_probabilities_give_no_mismatch_and_a_full_sample() -> None:
    same = logps([[-1.0, -2.0], [-0.5, -3.0]])
    figures = measure_mismatch(same, same, clip_max=3.0)
    assert figures.to_dict() == {
        "abs_mean": 0.0, "abs_max": 0.0, "k1": 0.0, "k3": 0.0, "ess": 1.0, "masked_fraction": 0.0,
    }  # fmt: skip
    assert figures.tokens == 4


def test_figures_equal_their_definitions() -> None:
    trainer, rollout = logps([[-1.0, -2.0, -0.1]]), logps([[-1.5, -1.0, -0.1]])
    d = [0.5, -1.0, 0.0]
    r = [math.exp(x) for x in d]
    figures = measure_mismatch(trainer, rollout, clip_max=1.5)
    assert figures.abs_mean == pytest.approx(0.5)
    assert figures.abs_max == pytest.approx(1.0)
    assert figures.k1 == pytest.approx(-sum(d) / 3)
    assert figures.k3 == pytest.approx(sum(w - 1 - x for w, x in zip(r, d, strict=True)) / 3)
    assert figures.ess == pytest.approx(sum(r) ** 2 / (3 * sum(w * w for w in r)))
    assert figures.masked_fraction == pytest.approx(1 / 3)


def test_masked_tokens_and_tokens_without_a_rollout_value_do_not_count() -> None:
    trainer = logps([[-1.0, -2.0, -9.0, -1.0]])
    rollout = logps([[-1.1, -2.0, -1.0, float("nan")]])
    mask = torch.tensor([[1, 1, 0, 1]])
    figures = measure_mismatch(trainer, rollout, mask)
    assert figures.tokens == 2
    assert figures.abs_max == pytest.approx(0.1)


def test_a_sequence_mode_masks_every_token_of_a_long_sequence_for_a_small_difference_per_token() -> None:
    trainer = torch.zeros(2, 100)
    rollout = trainer.clone()
    rollout[0] -= 0.012  # the length-biased ratio of a public report: exp(1.2) from 0.012 a token
    per_token = measure_mismatch(trainer, rollout, mode="token_mask", clip_max=3.0)
    per_sequence = measure_mismatch(trainer, rollout, mode="sequence_mask", clip_max=3.0)
    assert per_token.masked_fraction == 0.0
    assert per_sequence.masked_fraction == 0.5
    assert per_sequence.abs_mean == per_token.abs_mean
    assert per_sequence.ess < per_token.ess


def test_a_lower_bound_masks_small_ratios() -> None:
    trainer, rollout = logps([[-2.0, -1.0]]), logps([[-1.0, -1.0]])
    assert measure_mismatch(trainer, rollout, clip_min=0.5).masked_fraction == 0.5


def test_a_batch_without_tokens_is_no_mismatch() -> None:
    empty = torch.zeros(2, 3)
    figures = measure_mismatch(empty, empty - 1, torch.zeros(2, 3))
    assert (figures.abs_mean, figures.ess, figures.tokens) == (0.0, 1.0, 0)
    assert measure_mismatch(torch.zeros(0, 4), torch.zeros(0, 4)).tokens == 0


def test_an_overflowing_ratio_leaves_no_effective_sample_instead_of_nan() -> None:
    figures = measure_mismatch(torch.zeros(1, 2), torch.tensor([[-1e4, 0.0]]))
    assert figures.ess == 0.0
    assert figures.abs_max == 1e4


def test_small_differences_survive_bfloat16_and_large_magnitudes() -> None:
    trainer = torch.full((1, 1000), -20.0)
    assert measure_mismatch(trainer, trainer - 1e-4).k3 == pytest.approx(0.5e-8, rel=0.1)


@pytest.mark.parametrize("bad", ["tokens", "", "token"])
def test_an_unknown_mode_is_refused_with_the_choices(bad: str) -> None:
    with pytest.raises(SwapqError, match="token_truncate"):
        measure_mismatch(torch.zeros(1, 1), torch.zeros(1, 1), mode=bad)


def test_different_shapes_are_refused_with_the_shapes() -> None:
    with pytest.raises(SwapqError, match=r"\(1, 2\), \(1, 3\)"):
        measure_mismatch(torch.zeros(1, 2), torch.zeros(1, 3))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 5), st.integers(1, 7), st.integers(0, 2**31), st.sampled_from(["token_mask", "sequence_mask"]))
def test_sums_of_parts_equal_the_sums_of_the_whole(batch: int, length: int, seed: int, mode: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    trainer, rollout = torch.randn(2, 2 * batch, length, generator=generator)
    mask = torch.rand(2 * batch, length, generator=generator) > 0.3
    whole = MismatchSums.of(trainer, rollout, mask, mode=mode, clip_max=2.0)
    parts = [
        MismatchSums.of(trainer[s], rollout[s], mask[s], mode=mode, clip_max=2.0)
        for s in (slice(0, batch), slice(batch, None))
    ]
    joined = MismatchSums(parts[0].sums + parts[1].sums, torch.maximum(parts[0].maximum, parts[1].maximum)).result()
    for name, value in whole.result().to_dict().items():
        assert joined.to_dict()[name] == pytest.approx(value, abs=1e-9), name
    assert joined.k3 >= 0
    assert 0 <= joined.ess <= 1 + 1e-12
