"""Routing replay: the given experts, the model's own weights for them, and nothing else changed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import swapq
from swapq.errors import SwapqError, UnsupportedError
from tests.helpers.families import TINY, tiny
from tests.helpers.models import FAMILIES, prompts
from tests.helpers.recipes import tiny as tiny_recipe


def built(family: str, recipe: str | None = None) -> Any:
    model = FAMILIES[family]().to(torch.bfloat16)
    return model if recipe is None else swapq.convert(model, tiny_recipe(recipe), last_layers_bf16=0)


def logits(model: nn.Module, ids: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **inputs).logits


def own(model: nn.Module, ids: Tensor, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the experts that the routers chose for them."""
    with swapq.record_routing(model) as routing:
        return logits(model, ids, **inputs), routing.experts


def others(model: nn.Module, tokens: int) -> Tensor:
    """A record that has little to do with the router's wishes: int64 ``[layers with experts, tokens, 2]``."""
    with swapq.record_routing(model) as routing:
        logits(model, prompts()[:1, :2])
    count = min(block.num_experts for block in routing._blocks)
    generator = torch.Generator().manual_seed(5)
    shape = (len(routing.layers), tokens, count)
    return torch.rand(shape, generator=generator).argsort(dim=-1)[..., :2]


def routers(model: nn.Module) -> list[nn.Module]:
    names = ("gate", "router")
    return [m for n, m in model.named_modules() if n.rpartition(".")[2] in names and hasattr(m, "top_k")]


def forced(model: nn.Module, experts: Tensor, weights: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> list[Any]:
    """Hooks after which each router returns the given ids, and weights written down here without the family's code."""

    def hook(ids: Tensor) -> Any:
        def force(router: nn.Module, args: Any, output: Any) -> Any:
            scores = output[0] if torch.is_tensor(output[0]) else output
            return scores, weights(router, scores, ids).to(output[1].dtype), ids

        return force

    found = routers(model)
    assert len(found) == len(experts)
    return [router.register_forward_hook(hook(ids)) for router, ids in zip(found, experts, strict=True)]


def softmax_then_choose(router: nn.Module, scores: Tensor, ids: Tensor) -> Tensor:
    chosen = torch.softmax(scores, dim=-1, dtype=torch.float32).gather(-1, ids)
    normalised = getattr(router, "norm_topk_prob", True)
    return chosen / chosen.sum(-1, keepdim=True) if normalised else chosen


def choose_then_softmax(router: nn.Module, scores: Tensor, ids: Tensor) -> Tensor:
    return torch.softmax(scores.gather(-1, ids), dim=-1)


def sigmoid_without_bias(router: Any, scores: Tensor, ids: Tensor) -> Tensor:
    chosen = scores.sigmoid().gather(-1, ids)
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor


WEIGHTS = {
    "qwen3_moe": softmax_then_choose,
    "qwen2_moe": softmax_then_choose,
    "mixtral": softmax_then_choose,
    "gpt_oss": choose_then_softmax,
    "deepseek_v3": sigmoid_without_bias,
}


@pytest.mark.parametrize("family", TINY)
def test_a_models_own_choices_replayed_change_no_bit(family: str) -> None:
    torch.manual_seed(0)
    model = tiny(family, num_key_value_heads=4).eval()
    ids = prompts()
    plain = logits(model, ids)
    recorded, experts = own(model, ids)
    with swapq.replay_routing(model, experts) as routing:
        again = logits(model, ids)
    assert torch.equal(recorded, plain)
    assert torch.equal(again, plain)
    assert routing.counts.tolist() == [0, experts[..., 0].numel()]
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize("recipe", ["nvfp4-rl", "mxfp8-rl", "bf16"])
def test_a_converted_models_own_choices_replayed_change_no_bit(recipe: str) -> None:
    model = built("qwen3_moe", recipe)
    plain, experts = own(model, prompts())
    with swapq.replay_routing(model, experts):
        assert torch.equal(logits(model, prompts()), plain)


@pytest.mark.parametrize("recipe", [None, "nvfp4-rl"])
@pytest.mark.parametrize("family", WEIGHTS)
def test_other_choices_give_what_a_model_gives_whose_router_is_forced(family: str, recipe: str | None) -> None:
    model = built(family, recipe)
    experts = others(model, prompts().numel())
    plain = logits(model, prompts())
    with swapq.replay_routing(model, experts) as routing:
        replayed = logits(model, prompts())
    hooks = forced(model, experts, WEIGHTS[family])
    expected = logits(model, prompts())
    for hook in hooks:
        hook.remove()
    assert torch.equal(replayed, expected)
    assert not torch.equal(replayed, plain)
    assert 0.5 < routing.changed_fraction <= 1


def test_the_order_of_the_experts_is_no_change_of_choice() -> None:
    model = built("qwen3_moe")
    _, experts = own(model, prompts())
    with swapq.replay_routing(model, experts.flip(-1)) as routing:
        logits(model, prompts())
    assert routing.changed_fraction == 0


def gradients(model: nn.Module, experts: Tensor | None, inside: bool) -> dict[str, Tensor]:
    """Gradients of one step, the backward pass inside the context or after it."""
    model.zero_grad()
    model.train()
    if experts is None:
        model(prompts()).logits.float().square().mean().backward()
    else:
        with swapq.replay_routing(model, experts) as routing:
            loss = model(prompts()).logits.float().square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert routing.counts[1] == experts[..., 0].numel()  # recomputed layers are not counted again
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recipe", [None, "nvfp4-rl"])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointed_layers_replay_the_same_experts_when_they_are_recomputed(
    reentrant: bool, inside: bool, recipe: str | None
) -> None:
    model = built("qwen3_moe", recipe)
    experts = others(model, prompts().numel())
    plain = gradients(model, experts, inside)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    checkpointed = gradients(model, experts, inside)
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    without = gradients(model, None, inside)
    assert not all(torch.equal(plain[name], without[name]) for name in plain)


def test_a_recomputation_inside_another_replay_keeps_its_own_record() -> None:
    model = built("qwen3_moe").train()
    first, second = others(model, prompts().numel()), others(model, prompts().numel()).flip(1)
    expected = gradients(model, first, True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad()
    with swapq.replay_routing(model, first):
        loss = model(prompts()).logits.float().square().mean()
    with swapq.replay_routing(model, second):
        model(prompts())
        loss.backward()
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters() if name in expected)


def test_layers_in_torchs_checkpoint_wrapper_replay_too() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = built("qwen3_moe")
    experts = others(model, prompts().numel())
    plain = gradients(model, experts, False)
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer)
    wrapped = {
        name.replace("_checkpoint_wrapped_module.", ""): g for name, g in gradients(model, experts, False).items()
    }
    assert plain.keys() == wrapped.keys()
    assert all(torch.equal(plain[name], wrapped[name]) for name in plain)


def test_a_callers_own_checkpoint_replays_while_the_context_is_open() -> None:
    from torch.utils.checkpoint import checkpoint

    model = built("qwen3_moe")
    experts = others(model, prompts().numel())
    expected = gradients(model, experts, True)
    model.zero_grad()
    with swapq.replay_routing(model, experts):
        output: Any = checkpoint(lambda ids: model(ids).logits, prompts(), use_reentrant=False)
        output.float().square().mean().backward()
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters() if name in expected)


def test_a_model_inside_pefts_wrapper_is_replayed() -> None:
    import peft

    model = built("qwen3_moe", "nvfp4-rl")
    experts = others(model, prompts().numel())
    (expected,) = replayed(model, experts)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    assert torch.equal(replayed(peft.get_peft_model(model, config).eval(), experts)[0], expected)


@pytest.mark.parametrize("family", WEIGHTS)
def test_gradients_reach_the_router_through_the_weights(family: str) -> None:
    model = built(family).float()
    experts = others(model, prompts().numel())
    found = gradients(model, experts, False)
    hooks = forced(model, experts, WEIGHTS[family])
    expected = gradients(model, None, False)
    for hook in hooks:
        hook.remove()
    gates = [name for name, p in model.named_parameters() if any(p is r.weight for r in routers(model))]
    assert gates
    for name in gates:
        assert found[name].abs().max() > 0
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-9)


def test_positions_without_a_record_keep_the_routers_own_choice() -> None:
    model = built("qwen3_moe")
    plain, own_experts = own(model, prompts())
    experts = others(model, prompts().numel()).view(len(own_experts), *prompts().shape, 2)
    experts[:, 1:] = -1  # only the first sequence has a record
    with swapq.replay_routing(model, experts.flatten(1, 2)) as routing:
        replayed = logits(model, prompts())
    assert torch.equal(replayed[1:], plain[1:])
    assert not torch.equal(replayed[0], plain[0])
    assert routing.counts[1] == len(own_experts) * prompts().shape[1]
    filled = torch.where(experts.flatten(1, 2) < 0, own_experts, experts.flatten(1, 2))
    with swapq.replay_routing(model, filled):
        assert torch.equal(logits(model, prompts()), replayed)


@pytest.mark.parametrize("recipe", [None, "nvfp4-rl"])
def test_a_padded_batch_replays_what_the_sequences_alone_replay(recipe: str | None) -> None:
    model = built("qwen3_moe", recipe).float() if recipe is None else built("qwen3_moe", recipe)
    row, pad = prompts()[:1], 4
    experts = others(model, row.numel())
    with swapq.replay_routing(model, experts):
        alone = logits(model, row)
    padded = torch.cat([torch.zeros(1, pad, dtype=torch.long), row], dim=1)
    mask = (torch.arange(padded.shape[1]) >= pad).long()[None]
    gaps = torch.full((len(experts), pad, 2), -1)
    with swapq.replay_routing(model, torch.cat([gaps, experts], dim=1)):
        beside = logits(model, padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    difference = (beside[:, pad:] - alone).abs()
    assert difference.max() < 1e-5 if recipe is None else difference.float().mean() < 0.01


def test_sequences_packed_in_one_row_replay_token_by_token() -> None:
    model = built("qwen3_moe").float()
    experts = others(model, prompts().numel())
    with swapq.replay_routing(model, experts):
        batch = logits(model, prompts())
    rows, length = prompts().shape
    with swapq.replay_routing(model, experts):
        packed = logits(
            model, prompts().view(1, -1), position_ids=torch.arange(length).repeat(rows)[None], use_cache=False
        )
    torch.testing.assert_close(packed.view(batch.shape), batch, rtol=0, atol=1e-5)


def test_a_record_may_have_all_hidden_layers_or_those_with_experts() -> None:
    model = built("deepseek_v3")  # the first layer is dense
    experts = others(model, prompts().numel())
    with swapq.replay_routing(model, experts):
        expected = logits(model, prompts())
    dense = torch.zeros(1, *experts.shape[1:], dtype=experts.dtype)
    with swapq.replay_routing(model, torch.cat([dense, experts]).to(torch.uint8)):
        assert torch.equal(logits(model, prompts()), expected)


def test_the_innermost_replay_counts_and_the_outer_one_returns() -> None:
    model = built("qwen3_moe")
    plain, experts = own(model, prompts())
    inner = others(model, prompts().numel())
    with swapq.replay_routing(model, experts):
        with swapq.replay_routing(model, inner):
            assert not torch.equal(logits(model, prompts()), plain)
        assert torch.equal(logits(model, prompts()), plain)


def test_after_an_error_inside_the_model_is_as_it_was() -> None:
    model = built("qwen3_moe")
    plain, experts = own(model, prompts())
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(RuntimeError, match="of the caller"), swapq.replay_routing(model, experts):
        raise RuntimeError("of the caller")
    with pytest.raises(SwapqError), swapq.replay_routing(model, experts):
        logits(model, prompts()[:1])
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert torch.equal(logits(model, prompts()), plain)
    copy.deepcopy(model)


WRONG: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "tokens": (
        lambda e: e[:, 1:],
        r"layers.0.mlp routes 36 tokens to 2 experts each, but the record has 35 tokens and 2",
    ),
    "top_k": (
        lambda e: e[..., :1],
        r"layers.0.mlp routes 36 tokens to 2 experts each, but the record has 36 tokens and 1",
    ),
    "layers": (lambda e: e[:1], r"experts has 1 layers, shape \[1, 36, 2\]; the model has 2 hidden layers, 2 of them"),
    "dimensions": (lambda e: e[0], r"experts has shape \[36, 2\] and dtype torch.int64; expected integers"),
    "no tensor": (lambda e: e.tolist(), r"experts has the type list; expected a tensor of integers"),
    "dtype": (lambda e: e.float(), r"dtype torch.float32; expected integers"),
    "an id too large": (
        lambda e: e.index_fill(1, torch.tensor(7), 8),
        r"layers.0.mlp: token 7 has the experts \[8, 8\]",
    ),
    "a repeated id": (
        lambda e: e.index_fill(1, torch.tensor(3), 0),
        r"token 3 has the experts \[0, 0\]; expected 2 different",
    ),
    "half a record": (
        lambda e: torch.where(torch.arange(2) == 1, -1, e),
        r"layers.0.mlp: token 0 has the experts \[\d, -1\].* or -1 everywhere",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_record_is_an_error_that_names_layer_and_shapes(fault: str) -> None:
    model = built("qwen3_moe")
    change, message = WRONG[fault]
    with pytest.raises(SwapqError, match=message), swapq.replay_routing(model, change(others(model, 36))):
        logits(model, prompts())


def replayed(model: nn.Module, experts: Tensor, forwards: int = 1) -> list[Tensor]:
    with swapq.replay_routing(model, experts):
        return [logits(model, prompts()) for _ in range(forwards)]


def test_a_second_forward_is_not_given_the_first_ones_experts() -> None:
    model = built("qwen3_moe")
    with pytest.raises(SwapqError, match="called a second time; a record is of one forward"):
        replayed(model, others(model, 36), forwards=2)


def test_models_that_cannot_be_replayed_are_refused_by_name() -> None:
    model = built("qwen3_moe")
    experts = others(model, 36)
    with pytest.raises(UnsupportedError, match="Linear has no routed experts"):
        replayed(nn.Linear(2, 2), experts)
    model.model.layers[1].compile(backend="eager")
    with pytest.raises(UnsupportedError, match=r"model\.layers\.1 is compiled"):
        replayed(model, experts)


def test_a_layer_that_routes_otherwise_is_an_error() -> None:
    model = built("qwen3_moe")
    experts = others(model, 36)
    weights, ids = torch.ones(36, 2, dtype=torch.bfloat16), torch.zeros(36, 2, dtype=torch.long)
    model.model.layers[1].mlp.gate.forward = lambda x: (None, weights, ids)
    with pytest.raises(UnsupportedError, match=r"layers\.1\.mlp \(Qwen3MoeSparseMoeBlock\) chose 0 times"):
        replayed(model, experts)


def test_a_layer_whose_forward_is_bypassed_is_an_error() -> None:
    model = built("qwen3_moe")
    experts = others(model, 36)
    model.model.layers[1].forward = lambda hidden_states, *args, **kwargs: hidden_states
    with pytest.raises(UnsupportedError, match=r"went past model\.layers\.1\.mlp without its `forward`"):
        replayed(model, experts)


def test_nothing_is_recorded_before_a_forward() -> None:
    with swapq.record_routing(built("qwen3_moe")) as routing:
        pass
    with pytest.raises(SwapqError, match=r"no forward has passed model\.layers\.0\.mlp yet"):
        _ = routing.experts
