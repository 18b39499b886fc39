"""The sums of a digest on CUDA: one pass over the words, without a host round trip."""

from functools import lru_cache

import torch
from torch import Tensor

from swapq.kernels.cuda.program import Program, program
from swapq.kernels.word_sums import LANE, chunk_keys, lane_keys

__all__ = ["add_word_sums"]

_THREADS = 256
_CHUNKS = 8  # a block reads 8 KiB of each of so many chunks


def add_word_sums(words: Tensor, into: Tensor) -> None:
    """See :func:`swapq.kernels.word_sums.add_word_sums`."""
    if words.data_ptr() % 16:
        words = words.clone()
    whole, rest = divmod(words.numel(), LANE)
    chunks = chunk_keys(whole + bool(rest), words.device)
    grid = (-(-(LANE if whole else rest) // (4 * _THREADS)), -(-(whole + bool(rest)) // _CHUNKS))
    keys = lane_keys(words.device)
    _kernel(words.device).launch(grid, _THREADS, words, whole, rest, keys, chunks, chunks.shape[1], into)


@lru_cache(maxsize=16)
def _kernel(device: torch.device) -> Program:
    """Kept: an update of an engine launches it for every tensor, twice."""
    return program("word_sums", device, THREADS=_THREADS, LANE=LANE, CHUNKS=_CHUNKS)
