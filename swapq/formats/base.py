"""What every format offers. A format knows bits; it does not know models, files or recipes."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from swapq.errors import FormatError

__all__ = ["Format", "Operand", "Parts"]


class Parts(NamedTuple):
    """The tensors of one quantized tensor. ``global_scale`` is None where the format has none."""

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None = None


class Operand(NamedTuple):
    """What a GEMM reads (contract section 3): exact BF16 ``values [..., N, K]`` and the FP32 ``scale`` applied after the sum.

    ``scale`` is one number per row (activations), one per matrix (weights), or None where it is 1. A format whose scales change along K
    (``fp8_block``) has one per row and block, ``[..., N, ceil(K/128)]``, which multiplies the sum over that block (contract section 7).
    """

    values: Tensor
    scale: Tensor | None


class Format(ABC):
    """One quantization format: a block length, the scopes and axes it knows, and the three maps between numbers and bytes."""

    name: str
    #: elements that share one block scale along the contraction axis
    block: int
    #: rows of a weight that share one block scale
    tile_rows: int = 1
    #: whether the last block along an axis may be shorter
    partial_blocks: ClassVar[bool] = False
    #: whether :meth:`stored` packs codes that lie one a byte in memory
    packs: ClassVar[bool] = False
    scopes: ClassVar[tuple[str, ...]]
    #: scope of weights
    default_scope: str
    #: scope of activations
    row_scope: str
    axes: ClassVar[tuple[int, ...]]
    #: checkpoint suffix of each part (``weight`` holds the codes)
    suffixes: ClassVar[dict[str, str]]
    #: dtype in which each part is stored and sent
    dtypes: ClassVar[dict[str, torch.dtype]]

    @property
    def shares_scale(self) -> bool:
        """Whether an FP32 scale spans a whole weight, which gate and up of an expert then share."""
        return "global_scale" in self.dtypes

    @abstractmethod
    def quantize(self, x: Tensor, *, scope: str, axis: int, amax: Tensor | None = None) -> Parts:
        """Codes and scales of ``x [..., M, K]`` in the dtype it has."""

    @abstractmethod
    def dequantize(self, parts: Parts, *, scope: str, axis: int) -> Tensor:
        """The float32 value of every element, in the contract's order of operations."""

    @abstractmethod
    def operand(self, parts: Parts, *, scope: str, axis: int) -> Operand:
        """The exact BF16 values and the FP32 scale that a GEMM applies after its sum."""

    @abstractmethod
    def part_shapes(self, shape: tuple[int, ...], *, scope: str, axis: int = -1) -> dict[str, tuple[int, ...]]:
        """Shape of each stored part of a tensor of ``shape``."""

    @abstractmethod
    def logical_shape(self, codes: Tensor) -> tuple[int, ...]:
        """Shape of the tensor whose codes, in memory or stored, these are."""

    def stored(self, parts: Parts) -> Parts:
        """The parts as they lie in files, on the wire and in an engine: packed, where a format keeps one code per element in memory."""
        return parts

    def loaded(self, parts: Parts) -> Parts:
        """Undo :meth:`stored`."""
        return parts

    def scope_of_stack(self, rows: int, stacked: int) -> str:
        """Scope of ``stacked`` equal weights above each other in ``rows``: no block scale reaches from one into the next, since gate and
        up of an expert are tensors of their own in a checkpoint."""
        return self.default_scope

    def may_vanish(self, parts: Parts) -> bool:
        """Whether some block scale is so small that a non-zero block may have become zeros; :meth:`underflowed_blocks` counts them."""
        return False

    def underflowed_blocks(self, x: Tensor, parts: Parts, *, scope: str, axis: int) -> int:
        """How many non-zero blocks of ``x`` dequantize to all zeros (contract section 0)."""
        alive = self._block_any(x != 0, scope, axis)
        shown = self._block_any(self.dequantize(parts, scope=scope, axis=axis) != 0, scope, axis)
        return int((alive & ~shown).sum())

    def _block_any(self, mask: Tensor, scope: str, axis: int) -> Tensor:
        mask = mask.transpose(-1, -2) if axis == -2 else mask
        blocks = self._grouped(mask, -1).any(-1)
        return self._grouped(blocks, -2).any(-2) if scope == "tile" else blocks

    def _grouped(self, x: Tensor, dim: int) -> Tensor:
        """Split ``dim`` into blocks ``(count, block)``, a ragged last block padded with zeros."""
        ragged = -x.shape[dim] % self.block
        if ragged:
            pad = (0, ragged) if dim == -1 else (0, 0, 0, ragged)
            x = torch.nn.functional.pad(x, pad)
        return x.unflatten(dim, (-1, self.block))

    def check(self, x: Tensor, *, scope: str, axis: int, name: str = "tensor") -> None:
        """Refuse what the format cannot hold.

        Raises:
            FormatError: an unknown scope or axis, a dtype that is not BF16, FP16 or FP32, too few dimensions, or a length along
                the block axis that is not a multiple of the block.
        """
        if scope not in self.scopes:
            raise FormatError(f"{self.name} of {name}: scope is {scope!r}; choose one of {', '.join(self.scopes)}")
        if axis not in self.axes:
            raise FormatError(f"{self.name} of {name}: axis is {axis}; choose one of {self.axes}")
        if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise FormatError(
                f"{self.name} of {name}: dtype is {x.dtype}; quantize a bfloat16, float16 or float32 tensor"
            )
        if x.dim() < max(-axis, 2 if scope in ("tile", "halves") else 1):
            raise FormatError(
                f"{self.name} of {name}: shape {tuple(x.shape)} has too few dimensions for axis {axis}, scope {scope!r}"
            )
        if axis == -1:
            self.check_length(x.shape[-1], name=name)

    def check_length(self, length: int, *, name: str = "tensor") -> None:
        """Refuse a contraction length that is not a multiple of the block.

        Raises:
            FormatError: naming the tensor, the length and the block.
        """
        if length % self.block and not self.partial_blocks:
            raise FormatError(
                f"{self.name} of {name}: its length {length} along the contraction axis is not a multiple of the block of "
                f"{self.block}; keep this tensor in BF16 (`keep_bf16`) or choose another format"
            )
