"""On a CUDA device: the golden bytes, the expert block's bits, and training, as on the CPU."""

import copy

import pytest
import torch
from torch import Tensor

import swapq
from swapq import doctor
from swapq.kernels import dispatch
from swapq.nn import FrozenExpertLinear, Gate, expert_block
from swapq.nn.functional import LinearSpec, TrainableExpertLinear, quantize_weight
from tests import test_golden as golden
from tests.helpers.models import prompts, qwen3_moe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
E, H, INNER, K = 8, 96, 64, 2


@pytest.mark.parametrize("entry", golden.INDEX, ids=lambda e: e["case"])
def test_every_byte_equals_the_golden_vector_on_cuda(entry: dict) -> None:
    case = golden.case_tensors(entry)
    if entry["scope"] == "pair":
        amax = torch.stack([case[h + "/input"].abs().amax().float() for h in ("gate", "up")]).amax().cuda()
        halves = ("gate/", "up/")
    else:
        amax, halves = None, ("",)
    for half in halves:
        q = golden.quantize(entry, case[half + "input"].cuda(), amax)
        assert golden.differing_bytes(q.codes.cpu(), case[half + "codes"]) == 0
        assert golden.differing_bytes(q.scales.cpu(), case[half + "scales"]) == 0
        assert golden.differing_bytes(q.dequantize(torch.float32).cpu(), case[half + "dequantized"]) == 0


def block(device: str, fmt: str, *, frozen: bool) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(7)
    masters = [torch.randn(E, 2 * INNER, H, generator=generator), torch.randn(E, H, INNER, generator=generator)]
    x = torch.randn(64, H, generator=generator).to(torch.bfloat16)
    index = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(64)])
    weights = torch.rand(64, K, generator=generator)
    masters = [m.to(device).requires_grad_() for m in masters]
    linears: list = []
    for master in masters:
        values, scale = quantize_weight(master, fmt).operand()
        trainable = TrainableExpertLinear(master, None, LinearSpec(fmt, fmt, "dequantized"))
        linears.append(FrozenExpertLinear(values, scale, fmt) if frozen else trainable)
    out = expert_block(x.to(device), index.to(device), weights.to(device), *linears, num_experts=E, gate=Gate("silu"))
    return out, masters


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_the_reference_gives_the_same_bits_in_trainer_and_engine_and_on_the_cpu(fmt: str) -> None:
    with dispatch.use("reference"):
        engine, trainer, cpu = (
            block("cuda", fmt, frozen=True)[0],
            block("cuda", fmt, frozen=False)[0],
            block("cpu", fmt, frozen=True)[0],
        )
    assert torch.equal(engine, trainer)
    assert torch.equal(engine.cpu(), cpu)


@pytest.mark.parametrize(
    ("recipe", "backward"), [("nvfp4-rl", "dequantized"), ("nvfp4-rl", "high_precision"), ("mxfp8-rl", "low_precision")]
)
def test_gradients_on_cuda_are_those_of_the_cpu_within_rounding(recipe: str, backward: str) -> None:
    model = swapq.convert(qwen3_moe(), recipe, backward=backward, last_layers_bf16=0)
    twin = copy.deepcopy(model).cuda()
    model(prompts(), labels=prompts()).loss.backward()
    ids = prompts().cuda()
    twin(ids, labels=ids).loss.backward()
    for (name, a), (_, b) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert (a.grad - b.grad.cpu()).norm() <= 0.05 * a.grad.norm() + 1e-6, name


def test_digests_do_not_depend_on_the_device() -> None:
    model = swapq.convert(qwen3_moe(), "nvfp4-rl", trainable=False)
    before = swapq.digest(model)
    assert swapq.digest(model.cuda()) == before
    for shape in [(0,), (), (7,), (300_001,), (5, 3, 11)]:
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            x = (torch.randn(shape) * 50).to(dtype)
            assert swapq.digest(x.cuda()) == swapq.digest(x)


def test_the_doctor_finds_no_gap_in_the_numerics() -> None:
    assert {f.status for f in doctor._numerics()} == {"ok"}
