"""Recipe nvfp4-pretrain: gradients in four bits, right on average, repeated from a seed; and no way to serve it by accident."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import swapq
from swapq.checkpoint.tensors import checkpoint_tensors
from swapq.kernels.routing import Routing
from swapq.nn.functional import LinearSpec, TrainableExpertLinear
from tests.helpers.models import prompts, qwen3_moe

SPEC = LinearSpec("nvfp4_tile", "nvfp4_tile", "low_precision")
COUNTS = [44, 0, 1, 19]


def case() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=generator).to(torch.bfloat16).requires_grad_()
    w = (torch.randn(4, 48, 96, generator=generator) * 0.2).requires_grad_()
    return x, w, torch.randn(64, 48, generator=generator).to(torch.bfloat16)


def grads(seed: int, x: Tensor, w: Tensor, dy: Tensor, spec: LinearSpec = SPEC) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    y = TrainableExpertLinear(w, None, spec)(x, Routing(torch.arange(64), tuple(COUNTS), 64, 1), gather=False)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    return dx.float(), dw.float()


def test_a_seed_repeats_the_gradients_and_another_draws_others() -> None:
    first, again, other = grads(1, *case()), grads(1, *case()), grads(2, *case())
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_the_mean_over_seeds_approaches_the_gradient_of_unquantized_dy() -> None:
    """Each draw is far from it, their mean is near: what remains is the nearest rounding of the other operand, and of saturated maxima."""
    x, w, dy = case()
    exact = grads(0, x, w, dy, LinearSpec("nvfp4_tile", "nvfp4_tile", "dequantized"))
    many = [grads(seed, x, w, dy) for seed in range(60)]
    for i, name in ((0, "dx"), (1, "dw")):
        draws = torch.stack([g[i] for g in many])
        one = (draws - exact[i]).flatten(1).norm(dim=1).mean() / exact[i].norm()
        mean = (draws.mean(0) - exact[i]).norm() / exact[i].norm()
        assert 0.05 < one < 0.35, name
        assert mean < (0.35 if name == "dx" else 0.95) * one, (
            name
        )  # dw keeps the rounding of x, which no draw averages away


def test_an_expert_without_rows_gets_exact_zeros() -> None:
    _, dw = grads(0, *case())
    assert dw[1].count_nonzero() == 0
    assert all(dw[e].count_nonzero() > 0 for e in (0, 2, 3))


def test_a_row_depends_on_its_neighbours_which_is_why_it_is_not_rolled_out() -> None:
    x, w, _ = case()
    loud = x.detach().clone()
    loud[1] *= 1000
    routing = Routing(torch.arange(64), (64,), 64, 1)
    outputs = [TrainableExpertLinear(w[:1], None, SPEC)(t, routing, gather=False)[0] for t in (x, loud)]
    assert not torch.equal(*outputs)


def converted(**overrides: object) -> torch.nn.Module:
    return swapq.convert(qwen3_moe(), "nvfp4-pretrain", last_layers_bf16=0, **overrides)


def test_a_model_trains_and_its_weights_lie_in_tiles() -> None:
    model = converted()
    torch.manual_seed(0)
    model(prompts(), labels=prompts()).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    tensors = dict(checkpoint_tensors(model))
    assert tensors["model.layers.0.mlp.experts.0.gate_proj.weight_scale"].shape == (2, 4)  # 32 x 64 in 16 x 16
    plain = qwen3_moe()
    plain(prompts(), labels=prompts()).loss.backward()
    name = "model.layers.0.mlp.experts.down_proj"
    ours, theirs = (dict(m.named_parameters())[name].grad.flatten() for m in (model, plain))
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 0.9


def test_it_is_refused_wherever_an_engine_would_get_it_and_the_reason_is_given(tmp_path: Path) -> None:
    qwen3_moe().save_pretrained(tmp_path / "src")
    for attempt in (
        lambda: swapq.export(converted(), tmp_path / "out"),
        lambda: swapq.convert_checkpoint(tmp_path / "src", tmp_path / "out", "nvfp4-pretrain", progress=False),
    ):
        with pytest.raises(swapq.SwapqError, match=r"not for rollouts: .*neighbours.*force_rollout=True"):
            attempt()
    assert not (tmp_path / "out").exists()
    assert any("not for RL rollouts" in warning for warning in swapq.plan(qwen3_moe(), "nvfp4-pretrain").warnings)


def test_forced_it_is_written_and_read_like_any_other(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = converted(force_rollout=True)
    swapq.export(model, tmp_path / "out")
    assert swapq.verify(tmp_path / "out").problems == []
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(loaded(prompts()).logits, model(prompts()).logits)
    assert swapq.digest(loaded) == swapq.digest(model) == swapq.digest(tmp_path / "out")
