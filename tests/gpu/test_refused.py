"""Refused numbers on the GPU are those of the definitions in torch, wherever in a tensor they stand."""

import pytest
import torch

from swapq.kernels import dispatch
from swapq.kernels.refused import REFUSED, any_refused
from swapq.qtensor import finite_flags

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

#: kind -> dtype, every number of it that fits 16 bits (a float32 as its upper half)
DTYPES = {
    "bf16": torch.bfloat16, "float32": torch.float32, "e4m3": torch.float8_e4m3fn, "e4m3_scale": torch.float8_e4m3fn, "e8m0": torch.uint8,
    "float32_scale": torch.float32,
}  # fmt: skip


def every_number(dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    bits = torch.arange(1 << 16, dtype=torch.int32)
    if dtype == torch.bfloat16:
        return bits.to(torch.uint16).view(dtype)
    return torch.cat([(bits << 16) + low for low in (0, 1, 0x7FFF, 0x8000, 0xFFFF)]).view(dtype)


@pytest.mark.parametrize("kind", DTYPES)
def test_every_number_is_refused_by_the_kernel_as_by_torch(kind: str) -> None:
    numbers = every_number(DTYPES[kind]).cuda()
    assert dispatch.kernels(numbers.device)
    found = any_refused([number.clone() for number in numbers[:, None]], [kind] * len(numbers))
    assert torch.equal(found, REFUSED[kind](numbers))
    assert found.any()
    assert not found.all()


@pytest.mark.parametrize("kind", DTYPES)
def test_one_refused_number_is_found_at_every_place_and_in_no_other_tensor(kind: str) -> None:
    dtype, sizes = DTYPES[kind], [0, 1, 3, 5, 16, 31, 40_000, 65_536, 65_537, 0, 200_001]
    tensors = [torch.ones(size, device="cuda").to(dtype) for size in sizes]
    if dtype == torch.uint8:
        tensors = [torch.full((size,), 127, dtype=dtype, device="cuda") for size in sizes]
    assert not any_refused(tensors, [kind] * len(sizes)).any()
    for i, size in enumerate(sizes):
        for place in {0, 1, 4, size // 2, size - 17, size - 2, size - 1} & set(range(size)):
            raw = tensors[i].view(torch.uint8).view(-1, dtype.itemsize)
            kept = raw[place].clone()
            raw[place] = 255  # NaN in all of them
            assert any_refused(tensors, [kind] * len(sizes)).nonzero().flatten().tolist() == [i], (size, place)
            raw[place] = kept


def test_views_that_are_not_aligned_or_contiguous() -> None:
    x = torch.ones(100, 33, dtype=torch.bfloat16, device="cuda")
    x[50, 7] = float("nan")
    views = [x[1:], x[:50], x[:, 7], x[:, 8:], x.t(), x[50, 1:7]]
    assert any_refused(views, ["bf16"] * len(views)).tolist() == [True, False, True, False, True, False]
    assert not all(finite_flags([x[:50], x]))
    assert all(finite_flags([x[:50], x[51:]]))
