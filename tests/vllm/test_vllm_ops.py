"""The engine's ops by themselves: ids that are nobody's, and rows of any shape."""

import pytest
import torch
from torch import Tensor

from swapq.qtensor import quantize

pytest.importorskip("vllm")
ops = pytest.importorskip("swapq_vllm.ops")
pytestmark = pytest.mark.vllm

EXPERTS, HIDDEN, INNER = 4, 64, 32
MAP = torch.tensor([2, -1, 0, 3, -1, 1], dtype=torch.int32)  # six experts on all ranks, four of them here


def block(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    stacks = []
    for shape in ((EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)):
        operand = quantize(torch.randn(shape, generator=generator).bfloat16(), "nvfp4").operand()
        stacks.append([operand.values, operand.scale])
    return ops.routed_experts(x, weights, ids, MAP, *stacks, "", "nvfp4", "silu", True)


@pytest.mark.parametrize("nobody", [-1, -2, 6, 100])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_id_that_is_no_experts_adds_nothing(nobody: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.tensor([[0, 5], [2, 3], [1, 4], [5, 0], [3, 1]], dtype=dtype)
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(2))
    elsewhere, padded = ids.clone(), ids.clone()
    elsewhere[:, 1], padded[:, 1] = 1, nobody  # 1 is another rank's
    assert torch.equal(block(x, padded, weights), block(x, elsewhere, weights))
    assert not torch.equal(block(x, padded, weights), block(x, ids, weights))


@pytest.mark.parametrize("lead", [(), (3,), (0,), (2, 0), (2, 3)])
def test_a_linear_takes_rows_of_any_shape(lead: tuple[int, ...]) -> None:
    operand = quantize(torch.randn(48, 64).bfloat16(), "mxfp8").operand()
    x = torch.randn(*lead, 64).bfloat16()
    y = ops.stacked_linear(x, [operand.values], None, "", "mxfp8")
    assert y.shape == (*lead, 48)
    assert y.dtype == torch.bfloat16
