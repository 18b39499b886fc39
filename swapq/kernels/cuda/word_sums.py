"""The sums of a digest on CUDA: one pass over the words, without a host round trip."""

import torch
from torch import Tensor

from swapq.kernels.cuda.program import program
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
    pieces = -(-(LANE if whole else rest) // (4 * _THREADS))
    with torch.cuda.device(words.device):
        kernel = program("word_sums", words.device, THREADS=_THREADS, LANE=LANE, CHUNKS=_CHUNKS)
        grid = (pieces, -(-(whole + bool(rest)) // _CHUNKS))
        kernel.launch(grid, _THREADS, words, whole, rest, lane_keys(words.device), chunks, chunks.shape[1], into)
