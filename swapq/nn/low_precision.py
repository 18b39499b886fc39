"""Gradients of backward ``low_precision``: both GEMMs of backward run on quantized operands (contract sections 5, 7 and 8).

| format     | dgrad                                    | wgrad                                                            |
|------------|------------------------------------------|------------------------------------------------------------------|
| mxfp8      | dy by rows x w by columns                | dy and x by columns                                              |
| fp8_block  | dy by 1x128 x w's own tiles              | dy and x by 128x1                                                |
| nvfp4_tile | dy in tensor scope, drawn, x w's tiles   | dy (drawn) and x by columns after a random Hadamard transform    |

"Drawn" is stochastic rounding from torch's default generator of the device: ``torch.manual_seed`` repeats it. Column-wise operands are
made of the high-precision tensor, never of the row-wise codes; a square tile is its own transpose, so w is quantized once.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from swapq import formats
from swapq.errors import UnsupportedError
from swapq.formats import Operand, Parts, hadamard
from swapq.formats.fp8_block import FP8Block
from swapq.formats.nvfp4 import NVFP4
from swapq.kernels import dispatch, reference, sliced
from swapq.kernels.routing import Routing
from swapq.qtensor import QTensor, quantize

if TYPE_CHECKING:
    from swapq.nn.functional import LinearSpec

__all__ = ["Gradients", "gradients_of"]


class Gradients(Protocol):
    """Backward of one format's linear. ``saved`` is what :meth:`save` returned."""

    def save(self, x: Tensor, master: Tensor, w: QTensor, routing: Routing) -> tuple[Tensor, ...]:
        """What backward needs of BF16 rows ``x [R, K]`` in routed order, the master, and the weight of forward ``[E, N, K]``."""
        ...

    def input_grad(
        self, saved: Sequence[Tensor], dy: Tensor, routing: Routing, spec: "LinearSpec", scope: str
    ) -> Tensor:
        """BF16 ``[R, K]`` from BF16 ``dy [R, N]``; ``scope`` is that of the weight of forward."""
        ...

    def weight_grad(self, saved: Sequence[Tensor], dy: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
        """``[E, N, K]`` in ``dtype``; an expert without rows gets exact zeros."""
        ...


class _MXFP8:
    form = formats.get("mxfp8")

    def save(self, x: Tensor, master: Tensor, w: QTensor, routing: Routing) -> tuple[Tensor, ...]:
        if _has_kernels(x):
            return master, *_column_kernels().quantize_columns(x.contiguous(), routing.counts)[:2]
        _, padded = routing.pad_rows(x, self.form.block)
        columns = quantize(padded, "mxfp8", axis=-2)
        return master, columns.codes, columns.scales

    def input_grad(
        self, saved: Sequence[Tensor], dy: Tensor, routing: Routing, spec: "LinearSpec", scope: str
    ) -> Tensor:
        w = saved[0].to(torch.bfloat16)
        w = w.transpose(-1, -2) if spec.transposed else w
        if _has_kernels(w):
            flat = w.contiguous().flatten(0, 1)
            columns = _column_kernels().column_values(flat, (w.shape[1],) * w.shape[0]).view(w.shape)
        else:
            columns = quantize(w, "mxfp8", axis=-2).operand().values
        rows = quantize(dy, "mxfp8").dequantize(torch.bfloat16)  # no FP32 scale: the operand itself
        return dispatch.grouped(dy.device).grouped_input_grad(rows, columns, routing)

    def weight_grad(self, saved: Sequence[Tensor], dy: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
        grouped, x = dispatch.grouped(dy.device), Parts(saved[1], saved[2])
        as_they_are = x.codes.shape[0] == dy.shape[0]  # how forward saved the groups: without padding, or each padded
        if as_they_are and _has_kernels(dy):  # a block ends where its group does
            dy_columns = _column_kernels().column_values(dy, routing.counts)
            return grouped.grouped_weight_grad(
                dy_columns, _column_kernels().stored_values(x, routing.counts), routing, dtype
            )
        padded, dy_rows = routing.pad_rows(dy, self.form.block)
        dy_columns = quantize(dy_rows, "mxfp8", axis=-2).operand().values
        if as_they_are:  # dy has no kernel: an odd length, or the reference was chosen after forward
            codes = routing.pad_rows(x.codes.view(torch.uint8), self.form.block)[1]
            x = Parts(codes.view(torch.float8_e4m3fn), x.scales)
        return grouped.grouped_weight_grad(
            dy_columns, self.form.operand(x, scope="block", axis=-2).values, padded, dtype
        )


def _has_kernels(x: Tensor) -> bool:
    return dispatch.kernels(x.device) and x.dtype == torch.bfloat16 and x.shape[-1] % 2 == 0 and x.numel() > 0


def _column_kernels() -> ModuleType:
    from swapq.kernels.cuda import columns

    return columns


class _FP8Block:
    form = FP8Block()

    def save(self, x: Tensor, master: Tensor, w: QTensor, routing: Routing) -> tuple[Tensor, ...]:
        columns = self._columns(x, routing)
        return w.codes, w.scales, columns.codes, columns.scales

    def input_grad(
        self, saved: Sequence[Tensor], dy: Tensor, routing: Routing, spec: "LinearSpec", scope: str
    ) -> Tensor:
        codes, scales = saved[:2]
        if self._has_kernels(dy, codes.shape[-1]):
            from swapq.kernels import stored

            return stored.input_grad(dy, Parts(codes, scales), scope, routing)
        sections = 2 if scope == "halves" else 1
        parts = self.form.quantize(dy.unflatten(-1, (sections, -1)), scope="row")
        rows = Operand(parts.codes.to(torch.bfloat16).flatten(-2), parts.scales.flatten(-2))
        across = self.form.row_scales(scales.transpose(-1, -2), codes.shape[-1])  # a scale per column of w
        w = Operand(codes.to(torch.bfloat16).transpose(-1, -2), across)
        slices = sliced.spans(codes.shape[-2], self.form.block, sections)
        return sliced.grouped_forward(rows, w, routing, slices).to(torch.bfloat16)

    def weight_grad(self, saved: Sequence[Tensor], dy: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
        dy_codes, x_codes = self._columns(dy, routing), Parts(saved[2], saved[3])
        counts = routing.padded_counts(self.form.block)
        if self._has_kernels(dy, x_codes.codes.shape[-1]):
            from swapq.kernels import sliced_gemm

            return sliced_gemm.grouped_weight_grad(dy_codes, x_codes, counts, dtype)
        dy_columns, x_columns = (self.form.operand(p, scope="row", axis=-2) for p in (dy_codes, x_codes))
        out = dy.new_zeros(routing.num_experts, dy.shape[1], x_columns.values.shape[0], dtype=dtype)
        for expert, rows in replace(routing, counts=counts).groups():
            a, b = (_columns(operand, rows, self.form.block) for operand in (dy_columns, x_columns))
            out[expert] = sliced.product(a, b, sliced.spans(a.values.shape[-1], self.form.block)).to(dtype)
        return out

    def _columns(self, rows: Tensor, routing: Routing) -> Parts:
        """Column-wise codes of rows in routed order, each group padded to whole blocks."""
        if self._has_kernels(rows, rows.shape[-1]):
            from swapq.kernels import quantize_blocks

            return quantize_blocks.quantize_columns_of_groups(rows, routing)
        return quantize(routing.pad_rows(rows, self.form.block)[1], "fp8_block", scope="row", axis=-2).parts

    @staticmethod
    def _has_kernels(dy: Tensor, k: int) -> bool:
        return (
            dispatch.kernels(dy.device)
            and dy.dtype == torch.bfloat16
            and dy.shape[-1] % 16 == 0
            and k % 16 == 0
            and dy.numel() > 0
        )


def _columns(operand: Operand, rows: slice, block: int) -> Operand:
    """One expert's rows of a column-wise operand: values ``[N, rows]``, scale ``[N, blocks]``."""
    if operand.scale is None:
        raise TypeError("a column-wise operand carries a scale per block")
    return Operand(operand.values[:, rows], operand.scale[:, rows.start // block : rows.stop // block])


class _NVFP4Tile:
    form = NVFP4(tile=True)

    def save(self, x: Tensor, master: Tensor, w: QTensor, routing: Routing) -> tuple[Tensor, ...]:
        if w.global_scale is None:
            raise TypeError("nvfp4 parts carry a global scale")
        groups = [self.form.quantize(t, scope="tensor") for t in _transformed(x, routing)]
        if not groups:
            return w.codes, w.scales, w.global_scale, *(x.new_empty(x.shape[1], 0) for _ in range(2)), x.new_empty(0)
        codes = torch.cat([g.codes for g in groups], -1)
        bits = torch.cat([g.scales.view(torch.uint8) for g in groups], -1)
        return w.codes, w.scales, w.global_scale, codes, bits, torch.stack([_scale(g) for g in groups])

    def input_grad(
        self, saved: Sequence[Tensor], dy: Tensor, routing: Routing, spec: "LinearSpec", scope: str
    ) -> Tensor:
        w = self.form.operand(Parts(*saved[:3]), scope="tile")
        drawn = self.form.quantize(
            dy, scope="tensor", draws=torch.rand(dy.shape, dtype=torch.float32, device=dy.device)
        )
        rows, scale = self.form.operand(drawn, scope="tensor").values, _scale(drawn)
        out = torch.empty(dy.shape[0], w.values.shape[-1], dtype=torch.bfloat16, device=dy.device)
        for expert, here in routing.groups():
            acc = reference.product(rows[here], w.values[expert].t())
            out[here] = (acc * (scale * saved[2][expert])).to(torch.bfloat16)
        return out

    def weight_grad(self, saved: Sequence[Tensor], dy: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
        codes, bits, decode = saved[3:]
        out = dy.new_zeros(routing.num_experts, dy.shape[1], codes.shape[0], dtype=dtype)
        experts = [expert for expert, _ in routing.groups()]
        start = 0
        for i, t in enumerate(_transformed(dy, routing)):
            end = start + t.shape[-1]
            part = Parts(
                codes[:, start // 2 : end // 2], bits.view(torch.float8_e4m3fn)[:, start // 16 : end // 16], decode[i]
            )
            drawn = self.form.quantize(
                t, scope="tensor", draws=torch.rand(t.shape, dtype=torch.float32, device=t.device)
            )
            a, b = (self.form.operand(p, scope="tensor").values for p in (drawn, part))
            out[experts[i]] = (reference.product(a, b) * (_scale(drawn) * decode[i])).to(dtype)
            start = end
        return out


def _transformed(rows: Tensor, routing: Routing) -> list[Tensor]:
    """Hadamard transform ``[N, rows]`` of each expert's rows, zero-padded to a multiple of 16."""
    padded, wide = routing.pad_rows(rows, hadamard.SIZE)
    return [hadamard.transform(wide[here]) for _, here in padded.groups()]


def _scale(parts: Parts) -> Tensor:
    if parts.global_scale is None:
        raise TypeError("nvfp4 parts carry a global scale")
    return parts.global_scale


_GRADIENTS: dict[str, Gradients] = {"mxfp8": _MXFP8(), "fp8_block": _FP8Block(), "nvfp4_tile": _NVFP4Tile()}


def gradients_of(fmt: str) -> Gradients:
    """The low-precision gradients of a format.

    Raises:
        UnsupportedError: a format that has none; recipes refuse it before.
    """
    if fmt not in _GRADIENTS:
        raise UnsupportedError(f"format {fmt!r} has no low-precision gradients; choose one of {', '.join(_GRADIENTS)}")
    return _GRADIENTS[fmt]
