"""Expanded operands that the CPU engine keeps between weight updates; refreshed in place, so their addresses never change."""

import torch
from torch import Tensor

from swapq import formats
from swapq.formats import Parts

__all__ = ["Operands"]

#: a weight whose float64 copy is at most this large keeps one, which saves a conversion in every forward
_WIDE_BYTES = 64 << 20


class Operands:
    """Operand of one stored weight, as the list that the ops take."""

    def __init__(self, parts: Parts, fmt: str, scope: str | None = None) -> None:
        self.fmt, self.scope = fmt, scope or formats.get(fmt).default_scope
        values, scale = self._of(parts)
        wide = values.numel() * 8 <= _WIDE_BYTES
        self.tensors = [values.to(torch.float64) if wide else values] + ([] if scale is None else [scale.clone()])

    def _of(self, parts: Parts) -> tuple[Tensor, Tensor | None]:
        form = formats.get(self.fmt)
        return form.operand(form.loaded(parts), scope=self.scope, axis=-1)

    def refresh(self, parts: Parts) -> None:
        """Take over new codes and scales."""
        values, scale = self._of(parts)
        self.tensors[0].copy_(values)
        if scale is not None:
            self.tensors[1].copy_(scale)
