"""The trainer computes with the weights the engine holds, and its masters learn."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import swapq
from swapq_trl.rounding import round_as_served
from tests.trl.jobs import tiny

IDS = torch.tensor([[4, 5, 13, 6, 17, 9, 3], [7, 7, 13, 3, 17, 8, 4]])


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8-rl", "nvfp4-rl"])
def test_a_forward_with_fp32_masters_equals_that_of_the_bf16_model(recipe: str) -> None:
    model = swapq.convert(tiny(), recipe)
    lowered = tiny().to(torch.bfloat16)
    lowered.model.rotary_emb = (
        model.model.rotary_emb
    )  # its FP32 buffer is no weight; from_pretrained leaves it alone too
    swapq.convert(lowered, recipe)
    with torch.no_grad(), autocast():
        plain = model(IDS).logits
        round_as_served(model)
        rounded = model(IDS).logits
        expected = lowered(IDS).logits
    assert not torch.equal(plain, expected)
    assert torch.equal(rounded, expected)


def test_masters_stay_in_place_and_receive_gradients() -> None:
    model = swapq.convert(tiny(), "nvfp4-rl")
    masters = {name: id(parameter) for name, parameter in model.named_parameters()}
    round_as_served(model)
    with autocast():
        model(IDS, labels=IDS).loss.backward()
    assert masters == {name: id(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_layer_gives_the_same_gradients(reentrant: bool) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = swapq.convert(tiny(), "nvfp4-rl").train()
        round_as_served(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with autocast():
            model(IDS, labels=IDS).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_nothing_is_rounded_outside_autocast() -> None:
    model = tiny()
    with torch.no_grad():
        before = model(IDS).logits
        round_as_served(model)
        assert torch.equal(model(IDS).logits, before)


def test_masters_are_back_after_a_forward_that_failed() -> None:
    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("out of memory")

    module = Broken()
    master = module.weight
    round_as_served(module)
    with pytest.raises(RuntimeError, match="out of memory"), autocast():
        module(torch.ones(3))
    assert module.weight is master


def test_a_shared_module_called_inside_itself_gets_its_masters_back() -> None:
    model = tiny()
    round_as_served(model)
    norm = model.model.norm
    master = norm.weight
    with autocast():
        out = checkpoint(lambda x: norm(norm(x)), torch.randn(2, 128), use_reentrant=False)
    assert out.dtype in (torch.bfloat16, torch.float32)
    assert norm.weight is master
