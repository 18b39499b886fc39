"""The two sums of a digest, on the device where the words lie.

``sum_i w_i * lane_key_j(i mod LANE) * chunk_key_j(i div LANE)`` modulo 2^64, ``j = 0, 1``: no order of summation, thread or device
changes them. Keys are odd, so one changed word always changes both.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from swapq.kernels import cpu, dispatch
from swapq.kernels.host import as_array

__all__ = ["LANE", "add_many_word_sums", "add_word_sums", "chunk_keys", "lane_keys"]

LANE = 1 << 16  # words per chunk: the key table is small, and position across chunks has keys of its own

#: below this many words numpy is fast enough, and numba need not be loaded
_FEW = 1 << 18
#: chunks that torch widens to 64 bits at a time
_SLAB = 32


def _splitmix64(index: Tensor) -> Tensor:
    """The splitmix64 generator's output for each int64 index (arithmetic wraps modulo 2^64)."""

    def shift(z: Tensor, n: int) -> Tensor:
        return (z >> n) & ((1 << (64 - n)) - 1)

    z = (index + 1) * -7046029254386353131
    z = (z ^ shift(z, 30)) * -4658895280553007687
    z = (z ^ shift(z, 27)) * -7723592293110705685
    return z ^ shift(z, 31)


def _keys(count: int, seed: int) -> Tensor:
    index = torch.arange(count, dtype=torch.int64, device="cpu") * 2
    return torch.stack((_splitmix64(index + seed), _splitmix64(index + 1 + seed))).bitwise_or_(1)


@lru_cache(maxsize=16)
def lane_keys(device: torch.device) -> Tensor:
    """int64 ``[2, LANE]``: keys of a word's place in its chunk."""
    return _keys(LANE, 0).to(device)


@lru_cache(maxsize=16)
def _chunk_table(size: int, device: torch.device) -> Tensor:
    return _keys(size, 1 << 40).to(device)


def chunk_keys(count: int, device: torch.device) -> Tensor:
    """int64 ``[2, n]``, ``n`` at least ``count``: keys of the chunks. Few tables serve all sizes, so that none is made twice."""
    return _chunk_table(_table_size(count), device)


def _table_size(count: int) -> int:
    return max(1 << 12, 1 << (count - 1).bit_length())


@lru_cache(maxsize=16)
def _host_keys(size: int) -> tuple[np.ndarray, np.ndarray]:
    host = torch.device("cpu")
    return lane_keys(host).numpy(), _chunk_table(size, host).numpy()


def add_word_sums(words: Tensor, into: Tensor) -> None:
    """Add both sums of ``words`` to ``into``. Nothing waits for the device.

    Args:
        words: int32 ``[n]``, contiguous.
        into: int64 ``[2]`` on the same device.
    """
    if not words.numel():
        return
    if words.device.type == "cpu":
        _add_on_cpu(words, into)
    elif dispatch.kernels(words.device):
        from swapq.kernels.cuda.word_sums import add_word_sums as launch

        launch(words, into)
    else:
        _add_in_torch(words, into)


def add_many_word_sums(words: Sequence[Tensor], into: Tensor) -> None:
    """:func:`add_word_sums` of each of ``words`` into its row of ``into`` ``[n, 2]``; in one launch where a kernel can."""
    if len(words) > 1 and dispatch.kernels(into.device):
        from swapq.kernels.cuda.word_sums import add_many_word_sums as launch

        launch(words, into)
        return
    for each, row in zip(words, into, strict=True):
        add_word_sums(each, row)


def _add_on_cpu(words: Tensor, into: Tensor) -> None:
    loops = cpu.compiled() if words.numel() > _FEW else None
    lanes, chunks = _host_keys(_table_size(-(-words.numel() // LANE)))
    sums, bits = into.numpy(), as_array(words)
    if loops is not None:
        loops.word_sums(bits, lanes, chunks, sums)
        return
    for chunk, start in enumerate(range(0, bits.size, LANE)):
        part = bits[start : start + LANE].astype(np.int64)
        for j in range(2):
            sums[j : j + 1] += np.dot(part, lanes[j, : part.size]) * chunks[j, chunk : chunk + 1]


def _add_in_torch(words: Tensor, into: Tensor) -> None:
    """The definition in torch: chunks are added up under their keys first, so that a lane's key multiplies once a slab."""
    lanes, chunks = lane_keys(words.device), chunk_keys(-(-words.numel() // LANE), words.device)
    whole = words.numel() // LANE
    for start in range(0, whole, _SLAB):
        stop = min(start + _SLAB, whole)
        wide = words[start * LANE : stop * LANE].view(-1, LANE).to(torch.int64)
        for j in range(2):
            into[j] += ((wide * chunks[j, start:stop, None]).sum(0) * lanes[j]).sum()
    rest = words[whole * LANE :].to(torch.int64)
    for j in range(2):
        into[j] += (rest * lanes[j, : rest.numel()]).sum() * chunks[j, min(whole, chunks.shape[1] - 1)]
