"""Public faults 30 to 42: autograd, empty and odd groups, sharding, loading, compile.

Faults 30 (quantizing again under checkpointing) and 33, 34, 36 (FSDP2) are tests of ``test_convert.py`` and ``test_distributed.py``.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import swapq
from swapq.kernels.routing import Routing
from swapq.nn.functional import LinearSpec, TrainableExpertLinear
from tests.helpers.models import prompts, qwen3_moe
from tests.public_faults.common import MODES, RECIPES, converted, exported, gradients, load, logits

IDS = [f"{r}-{b}" for r, b in MODES]
HIDDEN = 64


def groups(sizes: list[int]) -> Tensor:
    return torch.cat([torch.full((n, 1), e) for e, n in enumerate(sizes)]).to(torch.int64)


def run(backward: str, fmt: str, master: Tensor, x: Tensor, dy: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output and both gradients of one expert linear over routed rows."""
    master, x = master.clone().requires_grad_(), x.clone().requires_grad_()
    linear = TrainableExpertLinear(master, None, LinearSpec(fmt, fmt, backward))
    y = linear(x, Routing.of(index, master.shape[0]), gather=True)
    y.backward(dy)
    assert master.grad is not None
    assert x.grad is not None
    return y.detach(), x.grad, master.grad


def padded(rows: Tensor, sizes: list[int], multiple: int) -> tuple[Tensor, Tensor]:
    """Each group with zero rows up to a multiple, and where the true rows went."""
    pieces, places, start = [], [], 0
    for group in rows.split(sizes):
        size = -(-len(group) // multiple) * multiple
        pieces.append(torch.cat((group, rows.new_zeros(size - len(group), rows.shape[1]))))
        places.append(torch.arange(len(group)) + start)
        start += size
    return torch.cat(pieces), torch.cat(places)


SIZES = [[44, 0, 1, 83], [0, 0, 0, 5], [31, 32, 33, 1], [1, 1, 1, 1], [7, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("recipe", "backward"), MODES, ids=IDS)
def test_31_and_32_odd_and_empty_groups_equal_the_zero_padded_reference(
    recipe: str, backward: str, sizes: list[int]
) -> None:
    torch.manual_seed(sum(sizes))
    fmt, index = recipe.removesuffix("-rl"), groups(sizes)
    master = torch.randn(4, 96, HIDDEN)
    x, dy = (torch.randn(len(index), n).to(torch.bfloat16) for n in (HIDDEN, 96))
    y, dx, dw = run(backward, fmt, master, x, dy, index)
    big = [-(-n // 32) * 32 for n in sizes]
    (wide_x, place), (wide_dy, _) = padded(x, sizes, 32), padded(dy, sizes, 32)
    wide_y, wide_dx, wide_dw = run(backward, fmt, master, wide_x, wide_dy, groups(big))
    assert torch.equal(y, wide_y[place])
    assert torch.allclose(dx, wide_dx[place], rtol=2e-2, atol=1e-3)
    assert torch.allclose(dw, wide_dw, rtol=1e-5, atol=1e-5)
    for expert, n in enumerate(sizes):
        assert bool(dw[expert].any()) == bool(n)
        assert dw[expert].isfinite().all()


@pytest.mark.parametrize(("recipe", "backward"), MODES, ids=IDS)
def test_32_no_token_at_all_still_gives_every_parameter_a_gradient_of_zeros(recipe: str, backward: str) -> None:
    experts = converted(recipe, backward=backward).model.layers[0].mlp.experts
    for x, index in (
        (torch.zeros(0, HIDDEN), torch.zeros(0, 2, dtype=torch.int64)),
        (torch.randn(3, HIDDEN), torch.full((3, 2), -1)),
    ):
        experts.zero_grad()
        x.requires_grad_()
        experts(x, index, torch.rand(len(x), 2)).sum().backward()
        assert x.grad is not None
        assert not x.grad.any()
        assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())


FEW_EXPERTS = """
import os, sys, torch, swapq
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from swapq.nn.gather import whole
from tests.helpers.models import prompts, qwen3_moe

def build():
    return swapq.convert(qwen3_moe(num_experts=3), "nvfp4-rl", last_layers_bf16=0)

def work(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=4)
    model, plain = build(), build()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    for m in (model, plain):
        m(prompts(), labels=prompts()).loss.backward()
    expected = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(whole(p.grad), expected[name].grad, rtol=1e-4, atol=1e-6, msg=name)
    same = swapq.digest(model) == swapq.digest(plain)
    dist.destroy_process_group()
    sys.exit(0 if same else 1)

if __name__ == "__main__":
    import socket
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(work, (port,), nprocs=4, start_method="fork")
"""


def test_35_three_experts_over_four_ranks_train_like_one_process() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FEW_EXPERTS], cwd=root, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_37_and_38_loading_a_state_dict_reaches_the_forward_whatever_the_magnitude(
    recipe: str, trainable: bool
) -> None:
    source = qwen3_moe()
    with torch.no_grad():
        for p in source.parameters():
            p.mul_(100)
    source = converted(recipe, source, trainable=trainable)
    for assign in (False, True):
        target = converted(recipe, trainable=trainable)
        logits(target)  # whatever a forward may have kept
        state = {k: v.clone() for k, v in source.state_dict().items()}
        target.load_state_dict(state, strict=True, assign=assign)
        assert swapq.digest(target) == swapq.digest(source)
        assert torch.equal(logits(target), logits(source))


def test_38_a_qtensor_takes_fresh_scales_when_values_are_copied_into_it() -> None:
    for fmt in ("nvfp4", "mxfp8"):
        small, large = torch.randn(4, 64).to(torch.bfloat16), (torch.randn(4, 64) * 100).to(torch.bfloat16)
        q = swapq.quantize(small, fmt)
        q.copy_(large)
        assert swapq.digest(q) == swapq.digest(swapq.quantize(large, fmt))


@pytest.mark.parametrize("recipe", RECIPES)
def test_37_every_parameter_of_a_loaded_export_is_used_and_equals_its_file(tmp_path: Path, recipe: str) -> None:
    exported(tmp_path, recipe)
    model = load(tmp_path)
    assert swapq.digest(model) == swapq.digest(tmp_path)
    expected = logits(model)
    for name, p in model.named_parameters():
        if "norm" in name or ".gate." in name:
            continue
        kept = p.data.clone()
        p.data = torch.zeros_like(kept)
        assert not torch.equal(logits(model), expected), f"{name} is not what the forward reads"
        p.data = kept
    assert torch.equal(logits(model), expected)


def test_39_graphs_break_only_at_the_swapped_modules() -> None:
    """As docs/limits.md says; that logits and gradients are right under compile is a test of ``test_convert.py``."""
    torch._dynamo.reset()
    model = converted("mxfp8-rl", qwen3_moe(num_hidden_layers=1))
    with torch.no_grad():
        explained = torch._dynamo.explain(model)(prompts())
    reasons = {str(r.reason) for r in explained.break_reasons}
    assert explained.graph_break_count > 0
    assert all("Swapq" in r for r in reasons), reasons


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("recipe", "backward"), MODES, ids=IDS)
def test_40_tied_router_logits_route_alike_in_the_recompute(recipe: str, backward: str, reentrant: bool) -> None:
    model = qwen3_moe()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()  # every expert ties with every other
    model = converted(recipe, model, backward=backward).train()
    seen: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda m, args: seen.append(args[1].clone()))
    expected, routed = gradients(model), list(seen)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    seen.clear()
    found = gradients(model)
    assert len(seen) == 2 * len(routed)
    assert all(torch.equal(a, b) for a, b in zip(seen, routed + routed[::-1], strict=True))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], expected[k]) for k in found)


def test_42_how_much_of_a_small_delta_rounds_away_can_be_counted() -> None:
    """A merge into a quantized master is the trainer's to warn about; the library gives it the count, in codes."""
    master = torch.randn(64, 64).to(torch.bfloat16)
    delta = 1e-3 * torch.randn(64, 64)
    for fmt in ("nvfp4", "mxfp8"):
        before, after = swapq.quantize(master, fmt), swapq.quantize((master + delta).to(torch.bfloat16), fmt)
        changed = (before.codes.view(torch.uint8) != after.codes.view(torch.uint8)).float().mean()
        assert 0 < changed < 0.2
