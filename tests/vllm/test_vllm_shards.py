"""Which part of a stack a rank takes: whole experts, and of each its slice of gate, of up and of down's columns."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from swapq_vllm.stacks import Shard

E, INNER, HIDDEN = 6, 8, 4


def filled(shard: Shard, arrived: Tensor, shape: tuple[int, ...]) -> Tensor:
    live = torch.full(shape, -1)
    for region, part in zip(shard.held(live), shard.of(arrived), strict=True):
        region.copy_(part)
    return live


def test_one_rank_takes_a_stack_as_it_is() -> None:
    arrived = torch.arange(E * 2 * INNER * HIDDEN).view(E, 2 * INNER, HIDDEN)
    shard = Shard(tuple(range(E)), E, 1, 2)
    assert shard.whole
    assert torch.equal(filled(shard, arrived, arrived.shape), arrived)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_tensor_parallel_rank_takes_its_rows_of_gate_and_of_up(ranks: int) -> None:
    arrived = torch.arange(E * 2 * INNER * HIDDEN).view(E, 2 * INNER, HIDDEN)
    gate, up = arrived[:, :INNER], arrived[:, INNER:]
    size = INNER // ranks
    for rank in range(ranks):
        shard = Shard(tuple(range(E)), E, 1, 2, rank, ranks)
        live = filled(shard, arrived, (E, 2 * size, HIDDEN))
        rows = slice(rank * size, (rank + 1) * size)
        assert not shard.whole
        assert torch.equal(live, torch.cat([gate[:, rows], up[:, rows]], 1))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_tensor_parallel_rank_takes_its_columns_of_down(ranks: int) -> None:
    arrived = torch.arange(E * HIDDEN * INNER).view(E, HIDDEN, INNER)
    size = INNER // ranks
    for rank in range(ranks):
        live = filled(Shard(tuple(range(E)), E, 2, 1, rank, ranks), arrived, (E, HIDDEN, size))
        assert torch.equal(live, arrived[..., rank * size : (rank + 1) * size])


def test_every_rank_takes_all_fp32_scales() -> None:
    arrived = torch.arange(E * 2).view(E, 2)
    for rank in range(2):
        shard = Shard(tuple(range(E)), E, None, 2, rank, 2)
        assert shard.whole
        assert torch.equal(filled(shard, arrived, (E, 2)), arrived)


@pytest.mark.parametrize("held", [(0, 1, 2), (3, 4, 5), (1, 3, 5), (4,)])
def test_an_expert_parallel_rank_takes_its_experts_in_its_own_order(held: tuple[int, ...]) -> None:
    arrived = torch.arange(E * 2 * INNER * HIDDEN).view(E, 2 * INNER, HIDDEN)
    shard = Shard(held, E, 1, 2)
    assert not shard.whole
    assert torch.equal(filled(shard, arrived, (len(held), 2 * INNER, HIDDEN)), arrived[list(held)])
