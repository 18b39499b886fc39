"""The compiled CPU quantizers against the reference: every byte, on data made to tell rounding slips apart."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import swapq
from swapq import formats
from swapq.kernels import cpu, dispatch

pytest.importorskip("numba")
FORMATS = ["mxfp8", "nvfp4"]


def every_finite_pattern() -> Tensor:
    """All finite BF16 values, neighbours in one block."""
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return bits[torch.isfinite(bits)].reshape(-1, 32 * 17).contiguous()


def shuffled(exponents: range, rows: int = 256, k: int = 512) -> Tensor:
    generator = torch.Generator().manual_seed(len(exponents))
    mantissa = torch.randint(0, 128, (rows, k), generator=generator)
    exponent = torch.randint(exponents.start, exponents.stop, (rows, k), generator=generator)
    sign = torch.randint(0, 2, (rows, k), generator=generator)
    return ((sign << 15) | (exponent << 7) | mantissa).to(torch.int16).view(torch.bfloat16)


DATA = {
    "every finite pattern": every_finite_pattern(),
    "weights": (torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16),
    "one binade": shuffled(range(120, 121)),
    "eight binades": shuffled(range(116, 124)),
    "all binades": shuffled(range(255)),
    "subnormals": shuffled(range(2)),
    "largest": shuffled(range(250, 255)),
    "zeros of both signs": torch.zeros(4, 64).to(torch.bfloat16)
    * torch.tensor([1.0, -1.0]).repeat(32).to(torch.bfloat16),
}


def differing(x: Tensor, fmt: str, amax: Tensor | None = None) -> int:
    fast, form = cpu.quantize_matrix(x, fmt, amax), formats.get(fmt)
    slow = form.quantize(x, scope=form.default_scope, axis=-1, amax=amax)
    count = 0
    for a, b in zip(fast, slow, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        count += int((a.reshape(-1).view(torch.uint8) != b.reshape(-1).view(torch.uint8)).sum())
    return count


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_byte_equals_the_reference(fmt: str, data: str) -> None:
    assert differing(DATA[data], fmt) == 0


@pytest.mark.parametrize("factor", [1.0, 1.5, 7.0, 300.0])
def test_a_shared_amax_gives_the_bytes_of_the_reference(factor: float) -> None:
    x = DATA["weights"]
    assert differing(x, "nvfp4", x.abs().amax().float() * factor) == 0


def test_the_compiled_constant_is_the_contracts() -> None:
    from swapq.kernels import compiled

    assert compiled._ONE_OVER_448.view("uint32") == 0x3B124925


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    blocks=st.integers(1, 300),
    low=st.integers(0, 254),
    width=st.integers(1, 60),
    fmt=st.sampled_from(FORMATS),
)
def test_any_shape_and_range_gives_the_bytes_of_the_reference(
    rows: int, blocks: int, low: int, width: int, fmt: str
) -> None:
    x = shuffled(range(low, min(255, low + width)), rows, blocks * 32)
    assert differing(x, fmt) == 0


@pytest.mark.parametrize("data", DATA)
def test_the_amax_equals_torch(data: str) -> None:
    assert torch.equal(cpu.bf16_amax(DATA[data]), DATA[data].abs().amax().float())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_the_amax_shows_what_is_not_finite(bad: float) -> None:
    x = DATA["weights"].clone()
    x[3, 5] = bad
    assert not torch.isfinite(cpu.bf16_amax(x))


def test_without_numba_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = cpu.quantize_matrix(DATA["weights"], "nvfp4")
    monkeypatch.setattr(cpu, "compiled", lambda: None)
    slow = cpu.quantize_matrix(DATA["weights"], "nvfp4")
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(fast[:2], slow[:2], strict=True))
    assert torch.equal(cpu.bf16_amax(DATA["weights"]), DATA["weights"].abs().amax().float())


def test_a_length_that_the_block_does_not_divide_is_refused() -> None:
    with pytest.raises(swapq.SwapqError, match="40"):
        cpu.quantize_matrix(torch.zeros(2, 40, dtype=torch.bfloat16), "nvfp4")


# Stacks of weights


@pytest.mark.parametrize("kind", ["weights", "every finite pattern", "subnormals", "largest"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shared", [False, True])
def test_large_stacks_have_the_references_bytes(fmt: str, kind: str, shared: bool) -> None:
    x = DATA[kind]
    x = x[: len(x) // 4 * 4].reshape(2, 2, -1, x.shape[-1])
    x = x.repeat(1, 1, -(-(1 << 20) // x.numel()), 1).clone()
    x[1] *= 0.5
    amax = (x.abs().amax((-2, -1)).float() * 1.5).clamp(max=3e38) if shared and fmt == "nvfp4" else None
    assert cpu.quantize_weights(x, fmt, amax) is not None
    q = swapq.quantize(x, fmt, amax=amax)
    with dispatch.use("reference"):
        reference = swapq.quantize(x, fmt, amax=amax)
    assert swapq.digest(q) == swapq.digest(reference)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_stack_with_a_value_that_is_not_finite_takes_the_references_way(fmt: str, bad: float) -> None:
    x = torch.randn(2, 1024, 512).to(torch.bfloat16)
    x[1, 3, 5] = bad
    assert cpu.quantize_weights(x, fmt) is None
    if fmt == "nvfp4":
        assert cpu.quantize_weights(torch.ones_like(x), fmt, torch.tensor([1.0, bad])) is None
    values = swapq.quantize(x, fmt).dequantize()
    assert values[0].isfinite().all()
    assert not values[1].isfinite().all()
