"""MXFP8: E4M3 codes, one E8M0 scale per 32 elements (contract section 1). Scales are uint8 at rest, on the wire and in memory."""

from typing import ClassVar

import torch
from torch import Tensor

from swapq.formats.base import Format, Operand, Parts
from swapq.formats.bits import e4m3_cast, e8m0_ceil, e8m0_inverse, e8m0_value

__all__ = ["MXFP8", "ONE_OVER_448"]

ONE_OVER_448 = 0.0022321429569274187  # bits 0x3B124925


class MXFP8(Format):
    """``codes [..., M, K]`` float8_e4m3fn; ``scales`` uint8, ``[..., M, K/32]`` row-wise or ``[..., ceil(M/32), K]`` column-wise."""

    name = "mxfp8"
    block = 32
    scopes = ("block",)
    default_scope = row_scope = "block"
    axes = (-1, -2)
    suffixes: ClassVar[dict[str, str]] = {"codes": "weight", "scales": "weight_scale"}
    dtypes: ClassVar[dict[str, torch.dtype]] = {"codes": torch.float8_e4m3fn, "scales": torch.uint8}

    def quantize(self, x: Tensor, *, scope: str = "block", axis: int = -1, amax: Tensor | None = None) -> Parts:
        if axis == -2:
            scales = e8m0_ceil(self._grouped(x, -2).abs().amax(-2).float() * ONE_OVER_448)
        else:
            scales = e8m0_ceil(x.unflatten(-1, (-1, self.block)).abs().amax(-1).float() * ONE_OVER_448)
        codes = e4m3_cast(x.float() * self._spread(e8m0_inverse(scales), axis, x.shape[-2] if x.dim() > 1 else 1))
        return Parts(codes, scales)

    def dequantize(self, parts: Parts, *, scope: str = "block", axis: int = -1) -> Tensor:
        rows = parts.codes.shape[-2] if parts.codes.dim() > 1 else 1
        return parts.codes.float() * self._spread(e8m0_value(parts.scales), axis, rows)

    def operand(self, parts: Parts, *, scope: str = "block", axis: int = -1) -> Operand:
        return Operand(self.dequantize(parts, scope=scope, axis=axis).to(torch.bfloat16), None)

    def part_shapes(
        self, shape: tuple[int, ...], *, scope: str = "block", axis: int = -1
    ) -> dict[str, tuple[int, ...]]:
        *lead, m, k = shape if len(shape) > 1 else (1, *shape)
        scales = (*lead, -(-m // self.block), k) if axis == -2 else (*lead, m, k // self.block)
        return {"codes": tuple(shape), "scales": scales if len(shape) > 1 else scales[-1:]}

    def logical_shape(self, codes: Tensor) -> tuple[int, ...]:
        return tuple(codes.shape)

    def _spread(self, per_block: Tensor, axis: int, rows: int) -> Tensor:
        spread = per_block.repeat_interleave(self.block, dim=axis)
        return spread[..., :rows, :] if axis == -2 else spread
