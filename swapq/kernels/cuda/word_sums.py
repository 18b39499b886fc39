"""The sums of digests on CUDA: one pass over the words, without a host round trip."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from swapq.kernels.cuda.program import Program, program
from swapq.kernels.word_sums import LANE, chunk_keys, lane_keys

__all__ = ["add_many_word_sums", "add_word_sums"]

_THREADS = 256
_CHUNKS = 8  # a block reads 4 KiB of each of so many chunks
_PIECES = LANE // (4 * _THREADS)


def add_word_sums(words: Tensor, into: Tensor) -> None:
    """See :func:`swapq.kernels.word_sums.add_word_sums`."""
    words = _aligned(words)
    whole, rest = divmod(words.numel(), LANE)
    chunks = chunk_keys(whole + bool(rest), words.device)
    grid = (_PIECES if whole else -(-rest // (4 * _THREADS)), _groups(words))
    keys = lane_keys(words.device)
    _kernel("word_sums", words.device).launch(grid, _THREADS, words, whole, rest, keys, chunks, chunks.shape[1], into)


def add_many_word_sums(words: Sequence[Tensor], into: Tensor) -> None:
    """See :func:`swapq.kernels.word_sums.add_many_word_sums`."""
    words = [_aligned(w) for w in words]
    groups = [_groups(w) for w in words]
    rows = [(w.data_ptr(), w.numel(), first) for w, first in zip(words, accumulate(groups, initial=0), strict=False)]
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").to(into.device, non_blocking=True)
    chunks, keys = chunk_keys(max(groups) * _CHUNKS, into.device), lane_keys(into.device)
    kernel = _kernel("word_sums_many", into.device)
    kernel.launch((_PIECES * sum(groups),), _THREADS, table, len(words), keys, chunks, chunks.shape[1], into)


def _aligned(words: Tensor) -> Tensor:
    return words.clone() if words.data_ptr() % 16 else words


def _groups(words: Tensor) -> int:
    """Groups of chunks, one to a row of blocks."""
    return -(-words.numel() // (LANE * _CHUNKS))


@lru_cache(maxsize=32)
def _kernel(file: str, device: torch.device) -> Program:
    """Kept: an update of an engine launches them for every tensor."""
    return program(file, device, THREADS=_THREADS, LANE=LANE, CHUNKS=_CHUNKS)
