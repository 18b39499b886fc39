"""NVFP4: E2M1 codes, one E4M3 scale per 16 elements and one FP32 scale per scope (contract section 2)."""

from typing import ClassVar

import torch
from torch import Tensor

from swapq.formats.base import Format, Operand, Parts
from swapq.formats.bits import (
    F32_MAX,
    e2m1_decode,
    e2m1_encode,
    e2m1_encode_stochastic,
    e4m3_cast,
    pack_nibbles,
    unpack_nibbles,
)

__all__ = ["NVFP4", "ONE_SIXTH"]

ONE_SIXTH = 0.16666667163372040  # bits 0x3E2AAAAB
_RANGE = 2688.0  # 448 * 6: the largest block scale times the largest element


class NVFP4(Format):
    """``codes [..., M, K/2]`` uint8; ``scales [..., M, K/16]`` float8_e4m3fn (tile scope: ``[..., ceil(M/16), K/16]``);
    ``global_scale`` float32, one per leading index (tensor and tile scope) or one per row (row scope).

    Args:
        tile: the format ``nvfp4_tile`` of contract section 8: weights in 16x16 tiles, activations in tensor scope.
    """

    block = 16
    scopes = ("tensor", "row", "tile")
    axes = (-1,)
    suffixes: ClassVar[dict[str, str]] = {"codes": "weight", "scales": "weight_scale", "global_scale": "weight_scale_2"}
    dtypes: ClassVar[dict[str, torch.dtype]] = {
        "codes": torch.uint8,
        "scales": torch.float8_e4m3fn,
        "global_scale": torch.float32,
    }

    def __init__(self, *, tile: bool = False) -> None:
        self.name = "nvfp4_tile" if tile else "nvfp4"
        self.default_scope, self.row_scope = ("tile", "tensor") if tile else ("tensor", "row")
        self.tile_rows = self.block if tile else 1

    def quantize(
        self,
        x: Tensor,
        *,
        scope: str = "tensor",
        axis: int = -1,
        amax: Tensor | None = None,
        draws: Tensor | None = None,
    ) -> Parts:
        """Codes and scales. ``draws``, uniform in [0, 1) and of ``x``'s shape, round the elements stochastically; scales stay nearest."""
        encode, decode = self.global_scales(self.scope_amax(x, scope) if amax is None else amax.float())
        per_block = self._over_blocks(encode * ONE_SIXTH, scope, x.dim())
        scales = e4m3_cast((self._block_amax(x, scope) * per_block).clamp(max=F32_MAX))
        product = scales.float() * self._over_blocks(decode, scope, x.dim())
        factor = torch.div(torch.ones_like(product), product).clamp(max=F32_MAX)
        y = x.float() * self._spread(factor, scope, x.shape[-2] if x.dim() > 1 else 1)
        codes = e2m1_encode(y) if draws is None else e2m1_encode_stochastic(y, draws)
        return Parts(pack_nibbles(codes), scales, decode)

    def dequantize(self, parts: Parts, *, scope: str = "tensor", axis: int = -1) -> Tensor:
        decode = self._over_blocks(_required(parts.global_scale), scope, parts.codes.dim())
        return self._scaled_values(parts, scope) * decode

    def operand(self, parts: Parts, *, scope: str = "tensor", axis: int = -1) -> Operand:
        return Operand(self._scaled_values(parts, scope).to(torch.bfloat16), _required(parts.global_scale))

    def part_shapes(
        self, shape: tuple[int, ...], *, scope: str = "tensor", axis: int = -1
    ) -> dict[str, tuple[int, ...]]:
        *lead, k = shape
        blocks = (
            (*lead[:-1], -(-lead[-1] // self.block), k // self.block) if scope == "tile" else (*lead, k // self.block)
        )
        return {
            "codes": (*lead, k // 2),
            "scales": blocks,
            "global_scale": tuple(lead) if scope == "row" else tuple(lead[:-1]),
        }

    def logical_shape(self, codes: Tensor) -> tuple[int, ...]:
        return (*codes.shape[:-1], codes.shape[-1] * 2)

    def may_vanish(self, parts: Parts) -> bool:
        return bool((parts.scales.view(torch.uint8) == 0).any())

    @staticmethod
    def scope_amax(x: Tensor, scope: str = "tensor") -> Tensor:
        """float32 amax over the scope: per row, or per leading index (an expert). A scope without elements has amax 0."""
        dims = (-1,) if scope == "row" or x.dim() == 1 else (-2, -1)
        if 0 in x.shape[-len(dims) :]:
            return x.new_zeros(x.shape[: -len(dims)], dtype=torch.float32)
        return x.abs().amax(dims).float()

    @staticmethod
    def global_scales(amax: Tensor) -> tuple[Tensor, Tensor]:
        """``(S, G)``: the encode scale and its reciprocal, the stored decode scale. Zero amax gives 1; NaN and Inf stay visible."""
        encode = torch.div(torch.full_like(amax, _RANGE), amax).clamp(max=F32_MAX)
        encode = torch.where(amax == 0, torch.ones_like(encode), encode)
        return encode, torch.div(torch.ones_like(encode), encode)

    def _block_amax(self, x: Tensor, scope: str) -> Tensor:
        blocks = x.unflatten(-1, (-1, self.block)).abs().amax(-1)
        if scope == "tile":
            blocks = self._grouped(blocks, -2).amax(-2)
        return blocks.float()

    @staticmethod
    def _over_blocks(scale: Tensor, scope: str, dims: int) -> Tensor:
        """A scope's scale beside the blocks of a tensor of ``dims`` dimensions."""
        return scale.unsqueeze(-1) if scope == "row" or dims == 1 else scale[..., None, None]

    def _spread(self, per_block: Tensor, scope: str, rows: int) -> Tensor:
        spread = per_block.repeat_interleave(self.block, dim=-1)
        return spread.repeat_interleave(self.block, dim=-2)[..., :rows, :] if scope == "tile" else spread

    def _scaled_values(self, parts: Parts, scope: str) -> Tensor:
        rows = parts.codes.shape[-2] if parts.codes.dim() > 1 else 1
        return e2m1_decode(unpack_nibbles(parts.codes)) * self._spread(parts.scales.float(), scope, rows)


def _required(scale: Tensor | None) -> Tensor:
    if scale is None:
        raise TypeError("nvfp4 parts carry a global scale")
    return scale
