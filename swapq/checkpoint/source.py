"""Reading source tensors by position, and making codes of them: what a conversion writes and a verification computes again."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from swapq import formats
from swapq.checkpoint.raw import as_bytes
from swapq.checkpoint.units import Quantize, Slab, Target
from swapq.errors import CheckpointError
from swapq.formats import Parts
from swapq.kernels import cpu
from swapq.qtensor import require_finite

__all__ = ["SourceFiles", "matrix_of", "quantized", "vanished_blocks"]

_BLOCK = 128  # tile of a block-FP8 source


class SourceFiles:
    """Source files, opened once and read by position from any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.opened, self.lock = folder, dict[str, int](), threading.Lock()

    def descriptor(self, file: str) -> int:
        with self.lock:
            if file not in self.opened:
                self.opened[file] = os.open(self.folder / file, os.O_RDONLY)
            return self.opened[file]

    def read_into(self, file: str, start: int, buffer: memoryview, what: str) -> None:
        descriptor, done = self.descriptor(file), 0
        while done < len(buffer):
            got = os.preadv(descriptor, [buffer[done:]], start + done)
            if got == 0:
                raise CheckpointError(
                    f"{what}: {file} ends before its header says; it changed or was cut, download it again"
                )
            done += got

    def tensor(self, file: str, start: int, dtype: torch.dtype, shape: tuple[int, ...], what: str) -> Tensor:
        raw = torch.empty(shape, dtype=dtype)
        self.read_into(file, start, as_bytes(raw), what)
        return raw

    def close(self) -> None:
        for descriptor in self.opened.values():
            os.close(descriptor)


def matrix_of(slab: Slab, files: SourceFiles) -> Tensor:
    """A slab's matrix in BF16 ``[N, K]``, block-FP8 dequantized exactly first (contract section 7)."""
    x = files.tensor(slab.file, slab.start, slab.dtype, slab.shape, slab.name)
    if slab.scale is not None:
        scale = files.tensor(
            slab.scale.file, slab.scale.start, slab.scale.dtype, slab.scale.shape, slab.scale.name
        ).float()
        wide = scale.repeat_interleave(_BLOCK, 0)[: x.shape[0]].repeat_interleave(_BLOCK, 1)[:, : x.shape[1]]
        if wide.shape != x.shape:
            raise CheckpointError(
                f"{slab.scale.name}: shape {list(scale.shape)} does not cover {slab.name} {list(x.shape)} in blocks of {_BLOCK}"
            )
        x = x.float() * wide
    x = x.to(torch.bfloat16)
    return x.t().contiguous() if slab.transposed else x


def quantized(unit: Quantize, files: SourceFiles) -> Iterator[tuple[Target, Tensor, Parts]]:
    """``(target, its BF16 rows, codes and scales)`` of each weight of a unit.

    Raises:
        FormatError: a weight that is not finite, by name.
    """
    matrices = [matrix_of(slab, files) for slab in unit.slabs]
    amaxes = [cpu.bf16_amax(m) for m in matrices]
    for slab, matrix, amax in zip(unit.slabs, matrices, amaxes, strict=True):
        if not torch.isfinite(amax):
            require_finite(matrix, slab.name)
    shared = torch.stack(amaxes).amax()
    for target in unit.targets:
        rows = matrices[target.slab][target.first : target.first + target.rows]
        joint = shared if formats.get(target.fmt).shares_scale else None
        yield target, rows, cpu.quantize_matrix(rows, target.fmt, joint)


def vanished_blocks(rows: Tensor, fmt: str, parts: Parts) -> int:
    """Non-zero blocks that dequantize to zeros, because their scale is zero or as small as it can be (contract section 0)."""
    form = formats.get(fmt)
    return form.underflowed_blocks(rows, parts, scope=form.default_scope, axis=-1) if form.may_vanish(parts) else 0
