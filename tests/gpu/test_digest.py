"""Digests on the GPU are the CPU's."""

import pytest
import torch

from swapq.digest import Digests, tensor_digest
from swapq.kernels import dispatch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("size", [0, 1, 5, 4096, 262_143, 262_144, 262_148, 2_097_152, 9_999_999])
def test_a_digest_is_the_same_on_both_devices_by_kernel_and_by_torch(size: int) -> None:
    x = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert tensor_digest(x.cuda()) == tensor_digest(x)
    assert tensor_digest(x.cuda()[1:]) == tensor_digest(x[1:])
    with dispatch.use("reference"):
        assert tensor_digest(x.cuda()) == tensor_digest(x)


def test_tensors_that_share_launches_have_the_digests_that_each_has_on_the_cpu() -> None:
    sizes = [0, 1, 5, 4096, 262_143, 262_144, 262_148, 0, 2_097_152, 2_097_156, 9_999_999, 0]
    tensors = {f"{i}": torch.randint(0, 256, (sizes[i % 12] + i % 3,), dtype=torch.uint8) for i in range(100)}
    batch = Digests()
    batch.add_all((name, x.cuda()[i % 2 :]) for i, (name, x) in enumerate(tensors.items()))
    assert batch.result() == {name: tensor_digest(x[i % 2 :]) for i, (name, x) in enumerate(tensors.items())}


def test_a_batch_of_many_tensors_on_two_devices() -> None:
    x = torch.randn(2500, 33)
    batch = Digests()
    for i, row in enumerate(x):
        batch.add(f"gpu {i}", row.cuda())
        batch.add(f"cpu {i}", row)
    found = batch.result()
    assert all(found[f"gpu {i}"] == found[f"cpu {i}"] for i in range(len(x)))
