"""Reading source tensors by position, and making codes of them: what a conversion writes and a verification computes again."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from swapq import formats
from swapq.checkpoint.arena import Arena
from swapq.checkpoint.raw import as_bytes
from swapq.checkpoint.units import BLOCK, Expand, Quantize, Slab, Target
from swapq.errors import CheckpointError
from swapq.formats import Parts
from swapq.kernels import cpu
from swapq.qtensor import require_finite

__all__ = ["SourceFiles", "expanded", "matrix_of", "quantized", "vanished_blocks"]


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

    def tensor(
        self, file: str, start: int, dtype: torch.dtype, shape: tuple[int, ...], what: str, arena: Arena | None = None
    ) -> Tensor:
        raw = torch.empty(shape, dtype=dtype, device="cpu") if arena is None else arena.take(shape, dtype)
        self.read_into(file, start, as_bytes(raw), what)
        return raw

    def close(self) -> None:
        for descriptor in self.opened.values():
            os.close(descriptor)


def matrix_of(slab: Slab, files: SourceFiles, arena: Arena | None = None) -> Tensor:
    """A slab's matrix in BF16 ``[N, K]``, block-FP8 dequantized exactly first (contract section 7). In ``arena``, where one is given."""
    arena = arena or Arena()
    x = files.tensor(slab.file, slab.start, slab.dtype, slab.shape, slab.name, arena)
    if slab.scale is not None:
        scale = files.tensor(
            slab.scale.file, slab.scale.start, slab.scale.dtype, slab.scale.shape, slab.scale.name
        ).float()
        wide = scale.repeat_interleave(BLOCK, 0)[: x.shape[0]].repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
        x = x.float()
        x *= wide
    if slab.transposed:
        x = x.t()
    if x.dtype == torch.bfloat16 and x.is_contiguous():
        return x
    return arena.take((x.shape[0], x.shape[1]), torch.bfloat16).copy_(x)


def expanded(unit: Expand, files: SourceFiles, arena: Arena | None = None) -> Tensor:
    """The BF16 matrix of a block-FP8 weight that stays unquantized.

    Raises:
        FormatError: a weight that is not finite, by name.
    """
    matrix = matrix_of(unit.slab, files, arena)
    if not torch.isfinite(cpu.bf16_amax(matrix)):
        require_finite(matrix, unit.slab.name)
    return matrix


def quantized(unit: Quantize, files: SourceFiles, arena: Arena | None = None) -> Iterator[tuple[Target, Tensor, Parts]]:
    """``(target, its BF16 rows, codes and scales)`` of each weight of a unit; in ``arena``, where one is given.

    Raises:
        FormatError: a weight that is not finite, by name.
    """
    arena = arena or Arena()
    matrices = [matrix_of(slab, files, arena) for slab in unit.slabs]
    amaxes = [cpu.bf16_amax(m) for m in matrices]
    for slab, matrix, amax in zip(unit.slabs, matrices, amaxes, strict=True):
        if not torch.isfinite(amax):
            require_finite(matrix, slab.name)
    shared = torch.stack(amaxes).amax()
    for target in unit.targets:
        rows = matrices[target.slab][target.first : target.first + target.rows]
        joint = shared if formats.get(target.fmt).shares_scale else None
        yield target, rows, cpu.quantize_matrix(rows, target.fmt, joint, empty=arena.take)


def vanished_blocks(rows: Tensor, fmt: str, parts: Parts) -> int:
    """Non-zero blocks that dequantize to zeros, because their scale is zero or as small as it can be (contract section 0)."""
    form = formats.get(fmt)
    return form.underflowed_blocks(rows, parts, scope=form.default_scope, axis=-1) if form.may_vanish(parts) else 0
