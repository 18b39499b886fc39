"""Routing replay in the company of other contexts, of compiled callers and of weights that lie elsewhere."""

import copy
from typing import Any

import pytest
import torch

import swapq
from swapq.errors import SwapqError, UnsupportedError
from tests.helpers.models import prompts
from tests.test_replay import built, gradients, logits, others, own, replayed


def test_a_recording_inside_a_replay_records_it_and_does_not_end_it() -> None:
    model = built("qwen3_moe")
    experts = others(model, 36)
    (expected,) = replayed(model, experts)
    with swapq.replay_routing(model, experts), swapq.record_routing(model) as recorded:
        assert torch.equal(logits(model, prompts()), expected)
    assert torch.equal(recorded.experts, experts)


def test_a_recording_around_a_replay_records_what_was_replayed() -> None:
    model = built("qwen3_moe")
    experts = others(model, 36)
    with swapq.record_routing(model) as recorded:
        replayed(model, experts)
    assert torch.equal(recorded.experts, experts)


def test_contexts_that_are_left_in_another_order_take_only_their_own_record_away() -> None:
    model = built("qwen3_moe")
    experts = others(model, 36)
    (expected,) = replayed(model, experts.flip(1))
    first, second = swapq.record_routing(model), swapq.replay_routing(model, experts.flip(1))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(logits(model, prompts()), expected)
    second.__exit__(None, None, None)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_replay_that_no_forward_passes_is_an_error() -> None:
    model = built("qwen3_moe")
    other, experts = copy.deepcopy(model), others(model, 36)
    with (
        pytest.raises(SwapqError, match=r"no forward reached model\.layers\.0\.mlp"),
        swapq.replay_routing(model, experts),
    ):
        logits(other, prompts())


def test_two_models_at_once_have_a_record_each() -> None:
    first, second = built("qwen3_moe"), built("mixtral")
    records = others(first, 36), others(second, 36)
    expected = replayed(first, records[0]) + replayed(second, records[1])
    with swapq.replay_routing(first, records[0]), swapq.replay_routing(second, records[1]):
        found = [logits(first, prompts()), logits(second, prompts())]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_copy_made_while_routing_is_replayed_is_refused() -> None:
    model = built("qwen3_moe")
    with swapq.record_routing(model), pytest.raises(SwapqError, match=r"layers\.0\.mlp cannot be copied while"):
        copy.deepcopy(model)
    assert torch.equal(logits(copy.deepcopy(model), prompts()), logits(model, prompts()))


@pytest.mark.parametrize("warm", [True, False], ids=["compiled before", "compiled inside"])
def test_a_compiled_caller_replays_what_an_eager_one_does(warm: bool) -> None:
    model = built("qwen3_moe")
    experts = others(model, 36)
    (expected,) = replayed(model, experts)
    plain = logits(model, prompts())
    call: Any = torch.compile(lambda ids: model(ids, use_cache=False).logits, backend="eager")
    with torch.no_grad():
        if warm:
            assert torch.equal(call(prompts()), plain)
        with swapq.replay_routing(model, experts):
            assert torch.equal(call(prompts()), expected)
        assert torch.equal(call(prompts()), plain)


def test_a_model_whose_weights_are_offloaded_is_replayed() -> None:
    from accelerate import cpu_offload

    model = built("qwen3_moe")
    experts = others(model, 36)
    (expected,) = replayed(model, experts)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert next(model.parameters()).device.type == "meta"
    assert torch.equal(replayed(model, experts)[0], expected)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_record_may_be_overwritten_before_the_backward_pass(reentrant: bool) -> None:
    model = built("qwen3_moe")
    buffer = others(model, 36)
    expected = gradients(model, buffer, True)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.zero_grad()
    with swapq.replay_routing(model, buffer):
        loss = model(prompts()).logits.float().square().mean()
    buffer.copy_(buffer.flip(1))
    loss.backward()
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters() if name in expected)


def test_gradients_of_two_forwards_with_a_record_each_add_up() -> None:
    model = built("qwen3_moe").float()
    records = others(model, 36), others(model, 36).flip(1)
    apart = [gradients(model, record, False) for record in records]
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    losses = []
    for record in records:
        with swapq.replay_routing(model, record):
            losses.append(model(prompts()).logits.float().square().mean())
    torch.stack(losses).sum().backward()
    for name, p in model.named_parameters():
        if name in apart[0]:
            torch.testing.assert_close(p.grad, apart[0][name] + apart[1][name], rtol=1e-5, atol=1e-9)


def test_experts_that_choose_their_tokens_are_no_routing_to_replay() -> None:
    model = built("qwen3_moe")
    _, experts = own(model, prompts())
    gate = model.model.layers[1].mlp.gate

    def chosen_by_experts(x: torch.Tensor) -> Any:
        scores = torch.softmax(x @ gate.weight.t(), dim=-1)
        tokens = scores.topk(2, dim=0)[1]  # [2, experts]
        return scores, torch.ones(len(x), 2, dtype=x.dtype), tokens.t()[:1].expand(len(x), 2) % 8

    gate.forward = chosen_by_experts
    with pytest.raises(UnsupportedError, match=r"layers\.1\.mlp \(Qwen3MoeSparseMoeBlock\) chose 0 times"):
        replayed(model, experts)
