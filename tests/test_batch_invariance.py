"""A token's output is a function of that token, its experts and the weights alone, bit for bit (contract section 4)."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swapq.nn import FrozenExpertLinear, Gate, expert_block
from swapq.nn.functional import LinearSpec, TrainableExpertLinear, quantize_weight
from swapq.recipe_rules import FORMATS as RULES

E, H, INNER, K = 8, 96, 64, 2
FORMATS = ["mxfp8", "nvfp4", "fp8_block", "int4_g32"]
SLICED = [
    (fmt, tp) for fmt in FORMATS for tp in (1, 2) if (fmt, tp) != ("fp8_block", 2)
]  # its block of 128 is longer than 64 / 2


def rows_of(fmt: str) -> str:
    return RULES[fmt].activations[0]


class Block:
    """An expert block of fixed random weights; ``frozen`` as the engine runs it, else as the trainer does."""

    def __init__(self, fmt: str, *, frozen: bool = True, tp: int = 1) -> None:
        generator = torch.Generator().manual_seed(7)
        self.masters = [
            torch.randn(E, 2 * INNER, H, generator=generator),
            torch.randn(E, H, INNER, generator=generator),
        ]
        self.fmt, self.frozen, self.tp = fmt, frozen, tp

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        linears = [self._linear(m, s) for m, s in zip(self.masters, (1, self.tp), strict=True)]
        return expert_block(x, index, weights, *linears, num_experts=E, gate=Gate("silu"))

    def _linear(self, master: Tensor, slices: int) -> FrozenExpertLinear | TrainableExpertLinear:
        if not self.frozen:
            return TrainableExpertLinear(
                master.requires_grad_(), None, LinearSpec(self.fmt, rows_of(self.fmt), "dequantized", slices=slices)
            )
        values, scale = quantize_weight(master, self.fmt).operand()
        return FrozenExpertLinear(values, scale, rows_of(self.fmt), slices=slices)


def tokens(count: int = 64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, H, generator=generator).to(torch.bfloat16)
    index = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(count)])
    weights = torch.rand(count, K, generator=generator)
    return x, index, weights


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(torch.int16)


@pytest.mark.parametrize("frozen", [True, False], ids=["engine", "trainer"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(fmt: str, frozen: bool) -> None:
    block, (x, index, weights) = Block(fmt, frozen=frozen), tokens()
    whole = bits(block(x, index, weights))
    for row in range(64):
        one = slice(row, row + 1)
        assert torch.equal(bits(block(x[one], index[one], weights[one]))[0], whole[row])


@pytest.mark.parametrize("fmt", FORMATS)
def test_neighbours_a_thousand_times_larger_change_nothing(fmt: str) -> None:
    block, (x, index, weights) = Block(fmt), tokens()
    loud = x.clone()
    loud[1::2] *= 1000
    assert torch.equal(bits(block(x, index, weights))[::2], bits(block(loud, index, weights))[::2])


@pytest.mark.parametrize("fmt", FORMATS)
def test_order_changes_nothing(fmt: str) -> None:
    block, (x, index, weights) = Block(fmt), tokens()
    order = torch.randperm(64)
    assert torch.equal(bits(block(x[order], index[order], weights[order])), bits(block(x, index, weights))[order])


@pytest.mark.parametrize("extra", [1, 15, 16, 17, 200])
@pytest.mark.parametrize("fmt", FORMATS)
def test_padding_rows_change_nothing(fmt: str, extra: int) -> None:
    block, (x, index, weights) = Block(fmt), tokens()
    padded = torch.cat([x, torch.zeros(extra, H, dtype=x.dtype)])
    ids = torch.cat([index, torch.zeros(extra, K, dtype=index.dtype)])
    scale = torch.cat([weights, torch.zeros(extra, K)])
    assert torch.equal(bits(block(padded, ids, scale))[:64], bits(block(x, index, weights)))


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_number_of_threads_changes_nothing(fmt: str) -> None:
    block, (x, index, weights) = Block(fmt), tokens(200)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(bits(block(x, index, weights)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_bad_row_shows_itself_and_touches_no_other(fmt: str, bad: float) -> None:
    block, (x, index, weights) = Block(fmt), tokens()
    clean = bits(block(x, index, weights))
    broken = x.clone()
    broken[5, 40] = bad
    out = block(broken, index, weights)
    assert not out[5].isfinite().all()
    keep = torch.arange(64) != 5
    assert torch.equal(bits(out)[keep], clean[keep])


@pytest.mark.parametrize(("fmt", "tp"), SLICED)
def test_trainer_and_engine_give_the_same_bits(fmt: str, tp: int) -> None:
    x, index, weights = tokens(77)
    assert torch.equal(
        bits(Block(fmt, tp=tp)(x, index, weights)), bits(Block(fmt, frozen=False, tp=tp)(x, index, weights))
    )


def test_expert_tp_takes_one_row_scale_per_slice_of_the_down_projection() -> None:
    x, index, weights = tokens()
    assert not torch.equal(bits(Block("nvfp4")(x, index, weights)), bits(Block("nvfp4", tp=2)(x, index, weights)))


@pytest.mark.parametrize("fmt", FORMATS)
def test_parts_of_an_expert_parallel_group_sum_to_the_whole(fmt: str) -> None:
    """Ids outside 0..E-1 are another rank's: they add nothing."""
    block, (x, index, weights) = Block(fmt), tokens()
    whole = block(x, index, weights)
    here = torch.where(index < 4, index, -1)
    there = torch.where(index >= 4, index, E)
    parts = block(x, here, weights).float() + block(x, there, weights).float()
    assert (parts - whole.float()).norm() < 1e-2 * whole.float().norm()
    nothing = block(x, torch.full_like(index, E), weights)
    assert nothing.count_nonzero() == 0


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_tokens_give_no_rows(fmt: str) -> None:
    x, index, weights = tokens(3)
    assert Block(fmt)(x[:0], index[:0], weights[:0]).shape == (0, H)
    assert Block(fmt, frozen=False)(x[:0], index[:0], weights[:0]).shape == (0, H)


@pytest.mark.parametrize("poison", [FORMATS[0], FORMATS[1]])
def test_uninitialized_memory_is_never_read(poison: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every torch.empty filled with NaN: the output stays what it was."""
    x, index, weights = tokens(33)
    clean = bits(Block(poison)(x, index, weights))
    real: Callable[..., Tensor] = torch.empty

    def filled(*args: object, **kwargs: object) -> Tensor:
        out = real(*args, **kwargs)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    block = Block(poison)
    monkeypatch.setattr(torch, "empty", filled)
    assert torch.equal(bits(block(x, index, weights)), clean)
