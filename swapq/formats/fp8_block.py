"""FP8 block (DeepSeek-V3 style): E4M3 codes, one FP32 scale per 128x128 of a weight or per 1x128 of a row (contract section 7)."""

from typing import ClassVar

import torch
from torch import Tensor

from swapq.errors import FormatError
from swapq.formats.base import Format, Operand, Parts
from swapq.formats.bits import E4M3_MAX, e4m3_cast

__all__ = ["BLOCK", "FLOOR", "FP8Block"]

BLOCK = 128
FLOOR = 1e-10


class FP8Block(Format):
    """``codes [..., M, K]`` float8_e4m3fn; ``scales`` float32: ``[..., ceil(M/128), ceil(K/128)]`` (tile scope), ``[..., M, ceil(K/128)]``
    (row scope), ``[..., ceil(M/128), K]`` (row scope, column-wise). Blocks at the edges may be partial.

    Scope ``halves`` is ``tile`` in each half of the rows: gate above up, where 128 does not divide the length of either.
    """

    name = "fp8_block"
    block = tile_rows = BLOCK
    partial_blocks = True
    scopes = ("tile", "row", "halves")
    default_scope = "tile"
    row_scope = "row"
    axes = (-1, -2)
    suffixes: ClassVar[dict[str, str]] = {"codes": "weight", "scales": "weight_scale_inv"}
    dtypes: ClassVar[dict[str, torch.dtype]] = {"codes": torch.float8_e4m3fn, "scales": torch.float32}

    def check(self, x: Tensor, *, scope: str, axis: int, name: str = "tensor") -> None:
        super().check(x, scope=scope, axis=axis, name=name)
        if scope != "row" and axis != -1:
            raise FormatError(f"{self.name} of {name}: a square tile has no axis; leave `axis` out, or use scope 'row'")
        if scope == "halves" and x.shape[-2] % 2:
            raise FormatError(f"{self.name} of {name}: {x.shape[-2]} rows have no halves; use scope 'tile'")

    def quantize(self, x: Tensor, *, scope: str = "tile", axis: int = -1, amax: Tensor | None = None) -> Parts:
        if scope == "halves":
            codes, scales, _ = self.quantize(x.unflatten(-2, (2, -1)))
            return Parts(codes.flatten(-3, -2), scales.flatten(-3, -2))
        blocks = self._grouped(x.abs(), axis).amax(axis)
        if scope == "tile":
            blocks = self._grouped(blocks, -2).amax(-2)
        scales = blocks.float().clamp(min=FLOOR)
        scales = torch.div(scales, torch.full_like(scales, E4M3_MAX))
        inverse = torch.div(torch.ones_like(scales), scales)
        return Parts(e4m3_cast(x.float() * self._spread(inverse, x.shape, scope, axis)), scales)

    def dequantize(self, parts: Parts, *, scope: str = "tile", axis: int = -1) -> Tensor:
        return parts.codes.float() * self._spread(parts.scales, parts.codes.shape, scope, axis)

    def operand(self, parts: Parts, *, scope: str = "tile", axis: int = -1) -> Operand:
        """Codes as BF16, and one scale per row and 128 elements of K, which multiplies that slice's sum.

        Column-wise codes come transposed: their blocks run along what a weight gradient sums over.
        """
        values, scales = parts.codes.to(torch.bfloat16), parts.scales
        if axis == -2:
            return Operand(values.transpose(-1, -2), scales.transpose(-1, -2))
        return Operand(values, scales if scope == "row" else self.row_scales(scales, values.shape[-2], scope))

    def part_shapes(self, shape: tuple[int, ...], *, scope: str = "tile", axis: int = -1) -> dict[str, tuple[int, ...]]:
        *lead, m, k = shape if len(shape) > 1 else (1, *shape)
        down, across = -(-m // self.block), -(-k // self.block)
        down = 2 * -(-(m // 2) // self.block) if scope == "halves" else down
        scales = (down, across) if scope != "row" else (down, k) if axis == -2 else (m, across)
        return {"codes": tuple(shape), "scales": (*lead, *scales) if len(shape) > 1 else scales[-1:]}

    def may_vanish(self, parts: Parts) -> bool:
        return bool((parts.scales <= FLOOR / E4M3_MAX * 1.01).any())

    def logical_shape(self, codes: Tensor) -> tuple[int, ...]:
        return tuple(codes.shape)

    def scope_of_stack(self, rows: int, stacked: int) -> str:
        return "halves" if stacked == 2 and rows // 2 % self.block else self.default_scope

    def row_scales(self, scales: Tensor, rows: int, scope: str = "tile") -> Tensor:
        """``[..., tiles, n] -> [..., rows, n]``: the scale of each row's tile."""
        if scales.shape[-2] == rows:
            return scales
        if scope == "tile":
            return scales.repeat_interleave(self.block, -2)[..., :rows, :]
        return self.row_scales(scales.unflatten(-2, (2, -1)), rows // 2).flatten(-3, -2)

    def _spread(self, scales: Tensor, shape: torch.Size, scope: str, axis: int) -> Tensor:
        if axis == -2:
            return scales.repeat_interleave(self.block, -2)[..., : shape[-2], :]
        wide = scales.repeat_interleave(self.block, -1)[..., : shape[-1]]
        return wide if scope == "row" else self.row_scales(wide, shape[-2], scope)

    def _block_any(self, mask: Tensor, scope: str, axis: int) -> Tensor:
        if scope == "halves":
            return super()._block_any(mask.unflatten(-2, (2, -1)), "tile", axis)
        return super()._block_any(mask, scope, axis)
