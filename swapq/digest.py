"""Digest: a 128-bit value of a tensor's bytes, shape and dtype that every device computes alike.

Bytes are read as little-endian 32-bit words ``w_i`` (the end zero-padded). Two sums ``sum_i w_i * key_j(i)`` modulo 2^64, with odd
pseudo-random 64-bit keys, do not depend on the order of summation, so a CPU and a GPU agree and no byte leaves the device; a changed
word always changes both sums. BLAKE2b then binds the sums to dtype and shape. It guards against faults, not against forgery.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

import torch
from torch import Tensor, nn

from swapq.errors import UnsupportedError
from swapq.kernels.word_sums import add_many_word_sums, add_word_sums
from swapq.qtensor import QTensor

__all__ = ["Digests", "digest", "tensor_digest"]

_PAGE = 1024  # sums of so many tensors come to the host as one tensor
_BATCH = 32  # so many tensors share a launch
_COPIED = 1 << 26  # bytes of copies (of a tensor-parallel rank's strided parts) after which a launch comes at once


class Digests(Mapping[str, str]):
    """Digests of many tensors, each computed where it lies: a mapping whose names are there at once, and whose values the host waits for
    once, when the first is asked for.

    A tensor is read when it is added: what happens to it later changes nothing.
    """

    def __init__(self) -> None:
        self._headers: dict[str, str] = {}
        self._pages: dict[torch.device, list[Tensor]] = {}
        self._names: dict[torch.device, list[str]] = {}
        self._found: dict[str, str] | None = None

    def __contains__(self, name: object) -> bool:
        return name in self._headers

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers)

    def __len__(self) -> int:
        return len(self._headers)

    def __getitem__(self, name: str) -> str:
        if self._found is None:
            self._found = self.result()
        return self._found[name]

    def add(self, name: str, x: Tensor) -> None:
        """Add plain tensor ``x``: its bytes in row-major order, shape and dtype."""
        page, row = self._place(name, x)
        add_word_sums(_words(x), page[row])

    def add_all(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """:meth:`add` of each of ``tensors``, which nothing writes meanwhile: few launches on a GPU."""
        batch: list[Tensor] = []
        copied = 0
        into = torch.empty(0)  # the rows from the batch's first on
        for name, x in tensors:
            page, row = self._place(name, x)
            full = len(batch) == _BATCH or copied > _COPIED
            if full or (batch and (row == 0 or page.device != into.device)):
                add_many_word_sums(batch, into[: len(batch)])
                batch, copied = [], 0
            into = into if batch else page[row:]
            batch.append(_words(x))
            copied += batch[-1].nbytes if batch[-1].data_ptr() != x.data_ptr() else 0
        add_many_word_sums(batch, into[: len(batch)])

    def _place(self, name: str, x: Tensor) -> tuple[Tensor, int]:
        """The page on the device of ``x``, and the row in it, for the sums of a tensor that is added."""
        self._found = None
        self._headers[name] = _header(x.dtype, x.shape)
        device = x.device
        names, pages = self._names.setdefault(device, []), self._pages.setdefault(device, [])
        row = len(names) % _PAGE
        if row == 0:
            pages.append(torch.zeros(_PAGE, 2, dtype=torch.int64, device=device))
        names.append(name)
        return pages[-1], row

    def result(self) -> dict[str, str]:
        """Name -> 32 hexadecimal digits, in the order in which the names were added. Waits for each device once."""
        sums = {
            name: pair
            for device, names in self._names.items()
            for name, pair in zip(names, torch.cat(self._pages[device])[: len(names)].tolist(), strict=True)
        }
        return {name: _bound(f"{header}|{sums[name][0]}|{sums[name][1]}") for name, header in self._headers.items()}


@lru_cache(maxsize=4096)
def _header(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}|{'x'.join(map(str, shape))}"


def _bound(header: str) -> str:
    return hashlib.blake2b(header.encode(), digest_size=16).hexdigest()


def _words(x: Tensor) -> Tensor:
    flat = x.detach().contiguous().view(-1)
    if flat.numel() * flat.element_size() % 4 == 0 and flat.data_ptr() % 4 == 0 and flat.numel():
        return flat.view(torch.int32)
    raw = flat.view(torch.uint8) if flat.numel() else torch.zeros(0, dtype=torch.uint8, device=x.device)
    if raw.numel() % 4:
        raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 4))
    if raw.data_ptr() % 4:
        raw = raw.clone()
    return raw.view(torch.int32)


def tensor_digest(x: Tensor) -> str:
    """32 hexadecimal digits for one plain tensor: its bytes in row-major order, shape and dtype. Waits for the device."""
    one = Digests()
    one.add("", x)
    return one.result()[""]


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
        return _bound(header)
    if isinstance(x, Tensor):
        return tensor_digest(x)
    if not isinstance(x, nn.Module | str | os.PathLike):
        raise UnsupportedError(f"a digest is of a tensor, a model or a checkpoint folder; got {type(x).__name__}")
    from swapq.checkpoint.tensors import named_tensors  # this file sits below the checkpoint package

    found = Digests()
    for name, tensor in named_tensors(x):
        found.add(name, tensor)
    return found.result()
