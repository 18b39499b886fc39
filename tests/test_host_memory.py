"""What reads a tensor's memory leaves its storage as FSDP2 needs it: a gathered parameter is freed by resizing it to nothing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import swapq
from swapq.checkpoint.raw import as_bytes
from swapq.digest import tensor_digest

READERS: dict[str, Callable[[Tensor], object]] = {
    "a digest": tensor_digest,
    "the bytes of a file": as_bytes,
    "NVFP4 codes": lambda x: swapq.quantize(x, "nvfp4"),
    "MXFP8 codes": lambda x: swapq.quantize(x, "mxfp8"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_tensor_that_was_read_can_still_be_freed(reader: str) -> None:
    x = torch.ones(4, 512, 512, dtype=torch.bfloat16)  # enough for the compiled loops
    kept = READERS[reader](x)
    assert kept is not None
    x.untyped_storage().resize_(0)


def test_bytes_of_a_parameter_keep_its_memory_alive() -> None:
    held = as_bytes(torch.nn.Parameter(torch.arange(64.0)))
    assert bytes(held) == torch.arange(64.0).numpy().tobytes()
