"""Gradient-norm spikes stand out against a median, and the reference KL is that of the definition."""

import math

import pytest
import torch

from swapq.diagnostics import SpikeMeter, find_spikes, measure_mismatch, reference_kl


def rows(norms: list[float]) -> list[dict[str, float]]:
    return [{"step": i + 1, "grad_norm": norm, "loss": 0.0} for i, norm in enumerate(norms)]


def test_a_norm_several_times_the_median_is_a_spike_and_does_not_hide_the_next() -> None:
    found = find_spikes(rows([1.0] * 10 + [8.0, 1.0, 9.0, 4.9]))
    assert [(s.step, s.norm) for s in found] == [(11, 8.0), (13, 9.0)]
    assert found[0].ratio == pytest.approx(8.0)


def test_a_slow_rise_is_no_spike() -> None:
    assert find_spikes(rows([1.03**i for i in range(200)]), window=20) == []


def test_the_first_steps_and_rows_without_a_norm_give_no_verdict() -> None:
    assert find_spikes(rows([1.0, 50.0, 1.0])) == []
    assert find_spikes([{"step": 1}, {"grad_norm": 5.0}, {"step": 2, "grad_norm": None}]) == []


def test_a_norm_that_is_not_finite_is_an_infinite_spike_and_is_forgotten() -> None:
    meter = SpikeMeter(warmup=2)
    ratios = [meter.ratio(norm) for norm in (1.0, 1.0, math.nan, math.inf, 1.0)]
    assert ratios[:2] == [None, None]
    assert ratios[2:4] == [math.inf, math.inf]
    assert ratios[4] == pytest.approx(1.0)


def test_norms_of_zero_are_not_divided_by() -> None:
    meter = SpikeMeter(warmup=1)
    assert [meter.ratio(n) for n in (0.0, 0.0, 1.0)] == [None, 1.0, math.inf]


def test_the_reference_kl_is_zero_for_equal_policies_and_near_the_true_one_for_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference = (torch.randn(8, generator=generator).mul(0.3).log_softmax(-1) for _ in range(2))
    samples = torch.multinomial(policy.exp(), 200_000, replacement=True, generator=generator)[None]
    true = float((policy.exp() * (policy - reference)).sum())
    figures = reference_kl(policy[samples], reference[samples])
    assert figures.k1 == pytest.approx(true, rel=0.05)
    assert figures.k3 == pytest.approx(true, rel=0.05)
    assert reference_kl(policy[samples], policy[samples]) == (0.0, 0.0)
    assert set(figures.to_dict("x_")) == {"x_k1", "x_k3"}


def test_masked_tokens_do_not_count() -> None:
    policy, reference = torch.tensor([[0.0, -1.0]]), torch.tensor([[-0.5, -9.0]])
    mask = torch.tensor([[1, 0]])
    assert reference_kl(policy, reference, mask).k1 == pytest.approx(0.5)
    assert measure_mismatch(reference, policy, mask).k1 == pytest.approx(0.5), "the mismatch's own definition"
