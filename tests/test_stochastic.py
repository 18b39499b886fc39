"""Stochastic rounding keeps the mean and repeats from a seed; the Hadamard transform undoes itself exactly (contract section 8)."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor

import swapq
from swapq import formats
from swapq.formats import hadamard
from swapq.formats.bits import E2M1_MAGNITUDES, e2m1_decode, e2m1_encode_stochastic
from swapq.formats.nvfp4 import NVFP4

GRID = torch.tensor(sorted({s * m for m in E2M1_MAGNITUDES for s in (1, -1)}))


def draws(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_the_mean_over_many_draws_is_the_value() -> None:
    y = torch.cat((torch.linspace(-6, 6, 241), torch.tensor([0.1, 1e-3, -0.24, 5.99, -2.51])))
    count = 40_000
    values = e2m1_decode(e2m1_encode_stochastic(y.expand(count, -1), draws((count, y.numel()), 0))).double()
    error = (values.mean(0) - y.double()).abs()
    spread = values.std(0) / count**0.5
    assert bool((error <= 4.5 * spread + 1e-6).all())
    assert abs(float((values.mean(0) - y.double()).mean())) < 1e-3


def test_only_the_two_neighbours_are_ever_drawn() -> None:
    y = torch.linspace(-6, 6, 501)
    for seed in range(20):
        value = e2m1_decode(e2m1_encode_stochastic(y, draws(y.shape, seed)))
        low = GRID[(torch.searchsorted(GRID, y, right=True) - 1).clamp(0, len(GRID) - 1)]
        high = GRID[torch.searchsorted(GRID, y).clamp(0, len(GRID) - 1)]
        assert bool(((value == low) | (value == high)).all())


def test_a_value_of_the_grid_is_never_moved_and_keeps_its_sign() -> None:
    y = torch.cat((GRID, torch.tensor([-0.0])))
    for seed in range(20):
        codes = e2m1_encode_stochastic(y, draws(y.shape, seed))
        assert torch.equal(e2m1_decode(codes), y)
        assert int(codes[-1]) == 8


@pytest.mark.parametrize("value", [7.0, torch.inf, torch.nan])
def test_what_is_beyond_the_grid_saturates_as_nearest_rounding_does(value: float) -> None:
    assert e2m1_encode_stochastic(torch.tensor([value]), draws((1,), 0)).tolist() == [7]


def test_a_seed_repeats_its_codes_and_another_seed_gives_others() -> None:
    form, x = NVFP4(), torch.randn(32, 64, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    first, again, other = (form.quantize(x, draws=draws((32, 64), seed)) for seed in (1, 1, 2))
    assert torch.equal(first.codes, again.codes)
    assert not torch.equal(first.codes, other.codes)
    assert torch.equal(first.scales.view(torch.uint8), form.quantize(x).scales.view(torch.uint8)), "scales stay nearest"


def test_a_quantized_gradient_has_the_mean_of_the_gradient() -> None:
    """Over many draws the dequantized tensor approaches x; nearest rounding stays where it is."""
    form, x = formats.get("nvfp4"), torch.randn(16, 32, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    assert isinstance(form, NVFP4)
    total = torch.zeros(16, 32, dtype=torch.float64)
    count = 4000
    for seed in range(count):
        total += form.dequantize(form.quantize(x, draws=draws((16, 32), seed))).double()
    nearest = form.dequantize(form.quantize(x)).double()
    parts = form.quantize(x)
    assert parts.global_scale is not None
    top = (6 * parts.scales.double() * parts.global_scale.double()).repeat_interleave(16, -1)
    inside = x.double().abs() <= top  # a block's largest value saturates where its scale was rounded down
    assert inside.float().mean() > 0.9
    drawn = (total / count - x.double())[inside].norm()
    assert drawn < 0.1 * (nearest - x.double())[inside].norm()


def test_the_hadamard_matrix_times_its_transpose_is_the_identity_in_exact_arithmetic() -> None:
    rows = [[Fraction(v) for v in row] for row in hadamard.matrix().tolist()]
    assert {abs(v) for row in rows for v in row} == {Fraction(1, 4)}
    for i, a in enumerate(rows):
        for j, b in enumerate(rows):
            assert sum(x * y for x, y in zip(a, b, strict=True)) == (i == j)


def test_a_product_of_two_transformed_operands_is_the_product_of_the_originals() -> None:
    """Small integers: every sum is exact, so nothing may differ."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-3, 4, (48, n), generator=generator).to(torch.bfloat16) for n in (24, 40))
    product = hadamard.transform(a).double() @ hadamard.transform(b).double().t()
    assert torch.equal(product, a.double().t() @ b.double())


def test_a_ragged_number_of_rows_is_refused_with_the_shape() -> None:
    with pytest.raises(swapq.SwapqError, match=r"\(20, 4\).*pad it"):
        hadamard.transform(torch.zeros(20, 4, dtype=torch.bfloat16))
