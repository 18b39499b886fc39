"""Digest: a 128-bit value of a tensor's bytes, shape and dtype that every device computes alike.

Bytes are read as little-endian 32-bit words ``w_i`` (the end zero-padded). Two sums ``sum_i w_i * key_j(i)`` modulo 2^64, with odd
pseudo-random 64-bit keys, do not depend on the order of summation, so a CPU and a GPU agree and no byte leaves the device; a changed
word always changes both sums. BLAKE2b then binds the sums to dtype and shape. It guards against faults, not against forgery.
"""

import hashlib
import os
from functools import lru_cache

import torch
from torch import Tensor, nn

from swapq.errors import UnsupportedError
from swapq.qtensor import QTensor

__all__ = ["digest", "tensor_digest"]

_LANE = 1 << 16  # words per chunk: the key table is small, and position across chunks has keys of its own


def _splitmix64(index: Tensor) -> Tensor:
    """The splitmix64 generator's output for each int64 index (arithmetic wraps modulo 2^64)."""

    def shift(z: Tensor, n: int) -> Tensor:
        return (z >> n) & ((1 << (64 - n)) - 1)

    z = (index + 1) * -7046029254386353131
    z = (z ^ shift(z, 30)) * -4658895280553007687
    z = (z ^ shift(z, 27)) * -7723592293110705685
    return z ^ shift(z, 31)


@lru_cache(maxsize=16)
def _keys(count: int, seed: int, device: torch.device) -> Tensor:
    index = torch.arange(count, dtype=torch.int64) * 2
    return torch.stack((_splitmix64(index + seed), _splitmix64(index + 1 + seed)), dim=1).bitwise_or_(1).to(device)


def _words(x: Tensor) -> Tensor:
    flat = x.detach().contiguous().reshape(-1)
    raw = flat.view(torch.uint8) if flat.numel() else torch.zeros(0, dtype=torch.uint8, device=x.device)
    if raw.numel() % 4:
        raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 4))
    if raw.data_ptr() % 4:
        raw = raw.clone()
    return raw.view(torch.int32)


def tensor_digest(x: Tensor) -> str:
    """32 hexadecimal digits for one plain tensor: its bytes in row-major order, shape and dtype."""
    words = _words(x)
    sums = torch.zeros(2, dtype=torch.int64, device=x.device)
    lane_keys = _keys(_LANE, 0, x.device)
    chunk_keys = _keys(max(1, -(-words.numel() // _LANE)), 1 << 40, x.device)
    for chunk, start in enumerate(range(0, words.numel(), _LANE)):
        part = words[start : start + _LANE].to(torch.int64)
        sums += (part[:, None] * lane_keys[: part.numel()]).sum(0) * chunk_keys[chunk]
    first, second = sums.tolist()
    header = f"{str(x.dtype).removeprefix('torch.')}|{'x'.join(map(str, x.shape))}|{first}|{second}"
    return hashlib.blake2b(header.encode(), digest_size=16).hexdigest()


def digest(x: "Tensor | nn.Module | str | os.PathLike[str]") -> "str | dict[str, str]":
    """Digest of a tensor or QTensor, or of every tensor of a model or checkpoint folder.

    A model and its export give equal dictionaries: names are those of the checkpoint.

    Returns:
        32 hexadecimal digits, or a dictionary from checkpoint name to digest.

    Raises:
        UnsupportedError: something else.
        CheckpointError: a folder that is damaged or incomplete.
    """
    if isinstance(x, QTensor):
        header = f"{x.format}|{x.scope}|{x.axis}|" + "|".join(
            f"{k}:{tensor_digest(v)}" for k, v in x.named_parts().items()
        )
        return hashlib.blake2b(header.encode(), digest_size=16).hexdigest()
    if isinstance(x, Tensor):
        return tensor_digest(x)
    if not isinstance(x, nn.Module | str | os.PathLike):
        raise UnsupportedError(f"a digest is of a tensor, a model or a checkpoint folder; got {type(x).__name__}")
    from swapq.checkpoint.tensors import named_tensors  # this file sits below the checkpoint package

    return {name: tensor_digest(tensor) for name, tensor in named_tensors(x)}
