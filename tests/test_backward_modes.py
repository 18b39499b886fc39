"""Forward and the three backward modes against the NumPy oracle, and against each other where they must differ."""

import numpy as np
import pytest
import torch
from torch import Tensor

from swapq.kernels.routing import Routing
from swapq.nn.functional import LinearSpec, TrainableExpertLinear, quantize_weight
from swapq.nn.low_precision import gradients_of
from swapq.recipe_rules import FORMATS
from tests.helpers import oracle

MODES = [
    ("mxfp8", "low_precision"),
    ("mxfp8", "high_precision"),
    ("mxfp8", "dequantized"),
    ("nvfp4", "high_precision"),
    ("nvfp4", "dequantized"),
    ("fp8_block", "low_precision"),
    ("fp8_block", "high_precision"),
    ("fp8_block", "dequantized"),
    ("int4_g32", "high_precision"),
    ("int4_g32", "dequantized"),
]
SPLITS = {"even": [32, 32, 32], "odd": [44, 0, 1, 83], "one expert": [0, 0, 0, 57], "single rows": [1, 1, 1, 1, 0]}
N, K = 64, 96


def spec_of(fmt: str, mode: str) -> LinearSpec:
    return LinearSpec(fmt, FORMATS[fmt].activations[0], mode)


def relative(a: Tensor, b: np.ndarray) -> float:
    return float(np.linalg.norm(a.double().numpy() - b) / max(np.linalg.norm(b), 1e-30))


def case(
    counts: list[int], *, outliers: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(counts))
    rows = sum(counts)
    x = torch.randn(rows, K, generator=generator)
    if outliers:
        x[:, ::24] *= 40
    w = torch.randn(len(counts), N, K, generator=generator) * 0.2
    dy = torch.randn(rows, N, generator=generator)
    return x.to(torch.bfloat16).requires_grad_(), w.to(dtype).requires_grad_(), dy.to(torch.bfloat16)


def run(x: Tensor, w: Tensor, dy: Tensor, counts: list[int], fmt: str, mode: str) -> tuple[Tensor, Tensor, Tensor]:
    routing = Routing(torch.arange(sum(counts)), tuple(counts), sum(counts), 1)
    y = TrainableExpertLinear(w, None, spec_of(fmt, mode))(x, routing, gather=False)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    return y.detach(), dx, dw


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("fmt", "mode"), MODES)
def test_output_and_gradients_are_within_one_percent_of_the_oracle(fmt: str, mode: str, split: str) -> None:
    counts = SPLITS[split]
    x, w, dy = case(counts)
    y, dx, dw = run(x, w, dy, counts, fmt, mode)
    start = 0
    for expert, count in enumerate(counts):
        rows = slice(start, start + count)
        start += count
        if not count:
            assert dw[expert].count_nonzero() == 0
            continue
        ref = oracle.linear(*(a.detach().float().numpy() for a in (x[rows], w[expert], dy[rows])), fmt, mode)
        assert relative(y[rows], ref[0]) < 1e-2
        assert relative(dx[rows], ref[1]) < 1e-2
        assert relative(dw[expert], ref[2]) < 1e-2


@pytest.mark.parametrize(("fmt", "mode"), MODES)
def test_the_oracle_of_another_mode_is_told_apart(fmt: str, mode: str) -> None:
    counts = [64]
    x, w, dy = case(counts, outliers=True)
    _, dx, dw = run(x, w, dy, counts, fmt, mode)
    for other in {m for f, m in MODES if f == fmt} - {mode}:
        ref = oracle.linear(*(a.detach().float().numpy() for a in (x, w[0], dy)), fmt, other)
        if fmt != "int4_g32":  # its rows are BF16: both of its modes have one weight gradient
            assert relative(dw[0], ref[2]) > 1e-2, f"dw of {mode} cannot be told from {other}"
        assert relative(dx, ref[1]) > 1e-2, f"dx of {mode} cannot be told from {other}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("fmt", "mode"), MODES)
def test_the_weight_gradient_has_the_dtype_of_the_master(fmt: str, mode: str, dtype: torch.dtype) -> None:
    x, w, dy = case([44, 20], dtype=dtype)
    assert run(x, w, dy, [44, 20], fmt, mode)[2].dtype == dtype


@pytest.mark.parametrize(("fmt", "mode"), MODES)
def test_fp32_and_bf16_masters_of_equal_value_give_equal_bits(fmt: str, mode: str) -> None:
    counts = [44, 20]
    x, w, dy = case(counts, dtype=torch.bfloat16)
    wide = w.detach().float().requires_grad_()
    for a, b in zip(run(x, w, dy, counts, fmt, mode), run(x, wide, dy, counts, fmt, mode), strict=True):
        assert torch.equal(a.float(), b.float().to(a.dtype).float())


@pytest.mark.parametrize(("fmt", "mode"), MODES)
def test_expanded_output_gradients_are_taken(fmt: str, mode: str) -> None:
    counts = [5, 3]
    x, w, _ = case(counts)
    routing = Routing(torch.arange(8), tuple(counts), 8, 1)
    y = TrainableExpertLinear(w, None, spec_of(fmt, mode))(x, routing, gather=False)
    y.sum().backward()
    assert w.grad is not None
    assert w.grad.isfinite().all()


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4", "int4_g32"])
def test_a_bias_is_added_before_the_one_rounding_and_gets_its_gradient(fmt: str) -> None:
    counts = [7, 0, 9]
    x, w, dy = case(counts)
    bias = torch.randn(3, N).requires_grad_()
    routing = Routing(torch.arange(16), tuple(counts), 16, 1)
    y = TrainableExpertLinear(w, bias, spec_of(fmt, "high_precision"))(x, routing, gather=False)
    (db,) = torch.autograd.grad(y, bias, dy)
    for expert, rows in ((0, slice(0, 7)), (2, slice(7, 16))):
        ref = oracle.linear(
            *(a.detach().float().numpy() for a in (x[rows], w[expert], dy[rows])), fmt, "high_precision"
        )[0]
        shifted = ref + oracle.bf16(bias[expert].detach().numpy())
        assert np.array_equal(y[rows].detach().float().numpy(), oracle.bf16(shifted.astype(np.float32)))
        assert torch.allclose(db[expert], dy[rows].float().sum(0), rtol=1e-5, atol=1e-4)
    assert db[1].count_nonzero() == 0


@pytest.mark.parametrize("split", SPLITS)
def test_mxfp8_columns_saved_without_padding_give_the_same_weight_gradient(split: str) -> None:
    """A GPU saves groups as they are; what reads them may be the reference all the same (rows of odd length, another choice)."""
    counts = SPLITS[split]
    x, w, dy = case(counts)
    rows, master = x.detach(), w.detach()
    routing = Routing(torch.arange(sum(counts)), tuple(counts), sum(counts), 1)
    gradients = gradients_of("mxfp8")
    saved = gradients.save(rows, master, quantize_weight(master, "mxfp8"), routing)
    kept = routing.padded(32)[1]
    as_they_are = (saved[0], saved[1].view(torch.uint8)[kept].view(saved[1].dtype), saved[2])
    for n in (N, N - 1):
        expected = gradients.weight_grad(saved, dy[:, :n], routing, torch.float32)
        assert torch.equal(gradients.weight_grad(as_they_are, dy[:, :n], routing, torch.float32), expected)
