"""Codes without masters pass the gradient of their rows on: what stands below them trains as below masters."""

from typing import Any

import pytest
import torch
from torch import Tensor

import swapq
from swapq.formats import Parts
from swapq.kernels import dispatch
from swapq.kernels.routing import Routing
from swapq.nn.expert_block import FrozenExpertLinear
from swapq.qtensor import QTensor
from tests.helpers.models import qwen3_moe

RECIPES: dict[str, dict[str, Any]] = {
    "nvfp4-rl": {},
    "mxfp8-rl": {"backward": "dequantized"},
    "fp8-block-rl": {"backward": "dequantized"},
    "int4-qat": {"weights": {"routed_experts": "int4_g32"}},
}


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine whose kernels give the reference's numbers and, as kernels do, no graph of autograd."""
    pytest.importorskip("triton")
    from swapq.kernels import fast

    ran: list[str] = []

    def reference(
        x: Tensor, w: Parts, fmt: str, scope: str, bias: Tensor | None, routing: Routing, gather: bool
    ) -> Tensor:
        ran.append(fmt)
        q = QTensor(w.codes, w.scales, fmt, scope, -1, torch.bfloat16, w.global_scale)
        with torch.no_grad():
            return FrozenExpertLinear(*q.operand(), "bf16" if "int4" in fmt else fmt, bias)(x, routing, gather=gather)

    def routed_rows(
        x: Tensor, w: Parts, fmt: str, scope: str, bias: Tensor | None, routing: Routing, *, gather: bool
    ) -> Tensor:
        return reference(x, w, fmt, scope, bias, routing, gather)

    def dense_linear(x: Tensor, w: Parts, fmt: str, bias: Tensor | None, *, scope: str) -> Tensor:
        rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
        one = Parts(*(None if t is None else t[None] for t in w))
        y = reference(rows, one, fmt, scope, bias, Routing.single(rows.shape[0], x.device), False)
        return y.view(*x.shape[:-1], -1)

    monkeypatch.setattr(dispatch, "fast", lambda *_: True)
    monkeypatch.setattr(fast, "routed_rows", routed_rows)
    monkeypatch.setattr(fast, "dense_linear", dense_linear)
    return ran


def outcome(recipe: str, trainable: bool) -> tuple[Tensor, Tensor]:
    """Logits and the gradient of what goes into the first layer."""
    torch.manual_seed(0)
    model = qwen3_moe().to(torch.bfloat16)
    swapq.convert(model, recipe, last_layers_bf16=0, trainable=trainable, **RECIPES[recipe])
    ids = torch.arange(1, 20)[None]
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    out = model(inputs_embeds=embeds, labels=ids)
    out.loss.backward()
    assert embeds.grad is not None
    return out.logits.detach(), embeds.grad


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_rows_have_the_gradient_that_they_have_below_masters(recipe: str) -> None:
    for held, trained in zip(outcome(recipe, False), outcome(recipe, True), strict=True):
        assert torch.equal(held, trained)


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_kernels_do_not_cut_the_gradient_off(recipe: str, on_kernels: list[str]) -> None:
    for held, trained in zip(outcome(recipe, False), outcome(recipe, True), strict=True):
        assert torch.equal(held, trained)
    assert on_kernels
