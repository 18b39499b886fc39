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
FORMATS = ["mxfp8", "nvfp4", "fp8_block", "int4", "int4_g32"]


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


def heavy_tailed() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 512, generator=generator) / torch.randn(256, 512, generator=generator).abs().clamp(min=1e-4)
    return (x * 0.02).to(torch.bfloat16)


def with_a_scale_of_one(x: Tensor, largest: float) -> Tensor:
    """Every block holds ``largest`` and nothing above it, so that halfway values stay halfway."""
    x = x.clamp(-largest, largest)
    x[:, ::16] = largest
    return x


DATA = {
    "every finite pattern": every_finite_pattern(),
    "weights": (torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16),
    "one binade": shuffled(range(120, 121)),
    "eight binades": shuffled(range(116, 124)),
    "all binades": shuffled(range(255)),
    "subnormals": shuffled(range(2)),
    "largest": shuffled(range(250, 255)),
    "heavy tails": heavy_tailed(),
    "around FP8's floor": shuffled(range(92, 96)),
    "around INT4's floor": shuffled(range(108, 114)),
    "halfway between FP8's": with_a_scale_of_one(shuffled(range(115, 137)), 448.0),
    "halfway between INT4's": with_a_scale_of_one(shuffled(range(124, 131)).mul(2).round().div(2), 7.0),
    "zeros of both signs": torch.zeros(4, 64).to(torch.bfloat16)
    * torch.tensor([1.0, -1.0]).repeat(32).to(torch.bfloat16),
}


def memory_of(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def of(data: str, fmt: str) -> Tensor:
    """Data in rows that the format can hold."""
    x, form = DATA[data], formats.get(fmt)
    return x if form.partial_blocks or x.shape[-1] % form.block == 0 else x.reshape(-1, form.block)


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
    assert differing(of(data, fmt), fmt) == 0


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_magnitude_as_the_largest_of_a_block_gives_the_bytes_of_the_reference(fmt: str) -> None:
    largest = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)  # zero, subnormals, all below Inf
    x = largest[:, None] * torch.linspace(-1, 1, 128).to(torch.bfloat16)
    assert differing(x.reshape(1, -1), fmt) == 0  # one row: tiles of FP8 too see one largest magnitude each


@pytest.mark.parametrize("factor", [1.0, 1.5, 7.0, 300.0])
def test_a_shared_amax_gives_the_bytes_of_the_reference(factor: float) -> None:
    x = DATA["weights"]
    assert differing(x, "nvfp4", x.abs().amax().float() * factor) == 0


def test_the_compiled_constants_are_the_contracts() -> None:
    from swapq.kernels import compiled

    assert compiled._ONE_OVER_448.view("uint32") == 0x3B124925
    assert compiled._ONE_SEVENTH.view("uint32") == 0x3E124925


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    blocks=st.integers(1, 150),
    low=st.integers(0, 254),
    width=st.integers(1, 60),
    fmt=st.sampled_from(FORMATS),
)
def test_any_shape_and_range_gives_the_bytes_of_the_reference(
    rows: int, blocks: int, low: int, width: int, fmt: str
) -> None:
    x = shuffled(range(low, min(255, low + width)), rows, blocks * max(32, formats.get(fmt).block))
    assert differing(x, fmt) == 0


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 300), columns=st.integers(1, 2400), low=st.integers(0, 254), width=st.integers(1, 60))
def test_tiles_cut_off_at_both_edges_have_the_references_bytes(rows: int, columns: int, low: int, width: int) -> None:
    assert differing(shuffled(range(low, min(255, low + width)), rows, columns), "fp8_block") == 0


@pytest.mark.parametrize("data", DATA)
def test_the_amax_equals_torch(data: str) -> None:
    assert torch.equal(cpu.bf16_amax(DATA[data]), DATA[data].abs().amax().float())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_the_amax_shows_what_is_not_finite(bad: float) -> None:
    x = DATA["weights"].clone()
    x[3, 5] = bad
    assert not torch.isfinite(cpu.bf16_amax(x))


@pytest.mark.parametrize("fmt", FORMATS)
def test_without_numba_the_reference_runs(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> list[Tensor]:
        parts = cpu.stored(cpu.quantize_matrix(DATA["weights"], fmt), fmt, memory_of)
        return [part.reshape(-1).view(torch.uint8) for part in parts if part is not None]

    fast = made()
    monkeypatch.setattr(cpu, "compiled", lambda: None)
    slow = made()
    assert all(torch.equal(a, b) for a, b in zip(fast, slow, strict=True))
    assert torch.equal(cpu.bf16_amax(DATA["weights"]), DATA["weights"].abs().amax().float())


@pytest.mark.parametrize("fmt", ["int4", "int4_g32"])
@pytest.mark.parametrize("shape", [(2, 128), (3, 5, 256), (1 << 10, 1 << 10)])
def test_packed_codes_have_the_references_bytes_and_unpack(fmt: str, shape: tuple[int, ...]) -> None:
    form, draw = formats.get(fmt), torch.Generator().manual_seed(0)
    memory = torch.randint(-7, 8, (torch.Size(shape).numel() + 1,), generator=draw, dtype=torch.int8)
    scales = torch.ones(*shape[:-1], shape[-1] // form.block, dtype=torch.bfloat16)
    for first in (0, 1):  # 1: no pair of codes lies at an even address
        parts = formats.Parts(memory[first:][: torch.Size(shape).numel()].view(shape), scales)
        reference = form.stored(parts)
        for packed in (cpu.stored(parts, fmt, memory_of), dispatch.stored(parts, fmt)):
            assert packed.codes.dtype == reference.codes.dtype
            assert torch.equal(packed.codes, reference.codes)
            assert torch.equal(form.loaded(packed).codes, parts.codes)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(0, 128), (128, 0)])
def test_an_empty_matrix_is_no_special_case(fmt: str, shape: tuple[int, int]) -> None:
    parts = cpu.quantize_matrix(torch.empty(shape, dtype=torch.bfloat16), fmt, torch.tensor(1.0))
    assert parts.codes.numel() == 0


def test_a_length_that_the_block_does_not_divide_is_refused() -> None:
    with pytest.raises(swapq.SwapqError, match="40"):
        cpu.quantize_matrix(torch.zeros(2, 40, dtype=torch.bfloat16), "nvfp4")


# Stacks of weights


@pytest.mark.parametrize("kind", ["weights", "every finite pattern", "subnormals", "largest"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shared", [False, True])
def test_large_stacks_have_the_references_bytes(fmt: str, kind: str, shared: bool) -> None:
    x = of(kind, fmt)
    x = x[: len(x) // 4 * 4].reshape(2, 2, -1, x.shape[-1])
    x = x.repeat(1, 1, -(-(1 << 20) // x.numel()), 1).clone()
    x[1] *= 0.5
    amax = (x.abs().amax((-2, -1)).float() * 1.5).clamp(max=3e38) if shared and fmt == "nvfp4" else None
    assert cpu.quantize_weights(x, fmt, amax) is not None
    q = swapq.quantize(x, fmt, amax=amax)
    with dispatch.use("reference"):
        reference = swapq.quantize(x, fmt, amax=amax)
    assert swapq.digest(q) == swapq.digest(reference)


@pytest.mark.parametrize("scope", ["tile", "halves"])
@pytest.mark.parametrize("shape", [(3, 200, 2000), (2, 2, 256, 1030), (1030, 1024)])
@pytest.mark.parametrize("across", [False, True])
def test_no_tile_reaches_into_the_next_weight(scope: str, shape: tuple[int, ...], across: bool) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 0.02).to(torch.bfloat16)
    # a tile's rows decide its scale
    x *= 4.0 ** torch.arange(x.shape[-2], dtype=torch.bfloat16)[:, None].div(50).floor()
    if across:
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert cpu.quantize_weights(x, "fp8_block", scope=scope) is not None
    q = swapq.quantize(x, "fp8_block", scope=scope)
    with dispatch.use("reference"):
        reference = swapq.quantize(x, "fp8_block", scope=scope)
    assert q.scales.shape == reference.scales.shape
    assert swapq.digest(q) == swapq.digest(reference)


@pytest.mark.parametrize(("fmt", "scope"), [("fp8_block", "row"), ("nvfp4", "row"), ("nvfp4", "tile")])
def test_scopes_without_loops_take_the_references_way(fmt: str, scope: str) -> None:
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    assert cpu.quantize_weights(x, fmt, scope=scope) is None
    q = swapq.quantize(x, fmt, scope=scope)
    with dispatch.use("reference"):
        assert swapq.digest(q) == swapq.digest(swapq.quantize(x, fmt, scope=scope))


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
