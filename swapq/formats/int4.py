"""INT4: symmetric integer codes, one BF16 scale per group of 128 or 32 (contract section 7). Weights only."""

from typing import ClassVar

import torch
from torch import Tensor

from swapq.formats.base import Format, Operand, Parts
from swapq.formats.bits import pack_nibbles, unpack_nibbles

__all__ = ["FLOOR", "INT4", "ONE_SEVENTH", "TOP"]

ONE_SEVENTH = 0.1428571492433548  # bits 0x3E124925
FLOOR = 1e-5
TOP = 7


class INT4(Format):
    """``codes [..., M, K]`` int8, -7 to 7; ``scales [..., M, K/group]`` BF16.

    At rest two codes share a byte, in two's complement, the even element in the low nibble: uint8 ``[..., M, K/2]``.

    Args:
        group: elements that share a scale. The format of another group than 128 has another name, ``int4_g32``.
    """

    packs = True
    scopes = ("group",)
    default_scope = row_scope = "group"
    axes = (-1,)
    suffixes: ClassVar[dict[str, str]] = {"codes": "weight", "scales": "weight_scale"}
    dtypes: ClassVar[dict[str, torch.dtype]] = {"codes": torch.uint8, "scales": torch.bfloat16}

    def __init__(self, group: int = 128) -> None:
        self.block = group
        self.name = "int4" if group == 128 else f"int4_g{group}"

    def quantize(self, x: Tensor, *, scope: str = "group", axis: int = -1, amax: Tensor | None = None) -> Parts:
        top = x.unflatten(-1, (-1, self.block)).abs().amax(-1).float()
        scales = (top * ONE_SEVENTH).clamp(min=FLOOR).to(torch.bfloat16)
        codes = torch.div(x.float(), self._spread(scales)).round().clamp(-TOP, TOP)
        return Parts(codes.to(torch.int8), scales)

    def dequantize(self, parts: Parts, *, scope: str = "group", axis: int = -1) -> Tensor:
        """The BF16 product, widened: what the GEMM runs on."""
        return self.operand(parts, scope=scope, axis=axis).values.float()

    def operand(self, parts: Parts, *, scope: str = "group", axis: int = -1) -> Operand:
        return Operand((parts.codes.float() * self._spread(parts.scales)).to(torch.bfloat16), None)

    def part_shapes(
        self, shape: tuple[int, ...], *, scope: str = "group", axis: int = -1
    ) -> dict[str, tuple[int, ...]]:
        *lead, k = shape
        return {"codes": (*lead, k // 2), "scales": (*lead, k // self.block)}

    def may_vanish(self, parts: Parts) -> bool:
        return bool((parts.scales <= FLOOR * 1.01).any())

    def logical_shape(self, codes: Tensor) -> tuple[int, ...]:
        return tuple(codes.shape) if codes.dtype == torch.int8 else (*codes.shape[:-1], codes.shape[-1] * 2)

    def stored(self, parts: Parts) -> Parts:
        return parts._replace(codes=pack_nibbles(parts.codes.view(torch.uint8) & 0xF))

    def loaded(self, parts: Parts) -> Parts:
        nibbles = unpack_nibbles(parts.codes).to(torch.int8)
        return parts._replace(codes=torch.where(nibbles > TOP, nibbles - 16, nibbles))

    def _spread(self, scales: Tensor) -> Tensor:
        return scales.float().repeat_interleave(self.block, dim=-1)
