"""Autograd of the quantized linears: one forward, three backward modes (contract section 5).

    y = x_hat @ w_hat.T        x_hat, w_hat: the operands of forward

| mode             | dgrad                               | wgrad                           | saved                      |
|------------------|-------------------------------------|---------------------------------|----------------------------|
| low_precision    | dy and w quantized                  | dy and x quantized by columns   | column codes of x; w       |
| high_precision   | dy and w in BF16                    | dy and x in BF16                | x and w                    |
| dequantized      | dy and bf16(w_hat)                  | dy and bf16(x_hat)              | codes and scales of x and w |

``low_precision`` is in ``swapq.nn.low_precision``, format by format. Weights beside BF16 rows (INT4) have x_hat = x, so ``dequantized`` is
their straight-through estimator. The weight gradient passes straight through the rounding and lands on the master in the master's dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from swapq import formats
from swapq.formats import Parts
from swapq.kernels import dispatch
from swapq.kernels.routing import Routing
from swapq.nn.expert_block import StoredExpertLinear, gathered, routed_linear, row_operand, row_parts, row_values
from swapq.nn.low_precision import gradients_of
from swapq.qtensor import QTensor, quantize

__all__ = ["LinearSpec", "TrainableExpertLinear", "quantize_weight"]


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """How one linear computes.

    Attributes:
        weights: format of the weight.
        activations: format of the rows, or ``"bf16"``.
        backward: ``"low_precision"``, ``"high_precision"`` or ``"dequantized"``; ``"bf16"`` where training does not quantize.
        transposed: the master is stored ``[E, K, N]`` (gpt-oss).
        slices: slices of K with row scales of their own (``expert_tp``).
    """

    weights: str
    activations: str
    backward: str
    transposed: bool = False
    slices: int = 1


def quantize_weight(
    master: Tensor, fmt: str, *, transposed: bool = False, amax: Tensor | None = None, stacked: int = 1
) -> QTensor:
    """A master's QTensor: BF16 first, whatever its dtype (contract section 0), then blocks along the contraction axis.

    Args:
        master: ``[E, N, K]`` or ``[N, K]``; ``[E, K, N]`` if ``transposed``. One FP32 scale per expert, so fused gate and up share it.
        stacked: matrices above each other in N (gate and up: 2), over whose border no tile reaches.
    """
    w = master.detach().to(torch.bfloat16)
    w = w.transpose(-1, -2) if transposed else w
    return quantize(w, fmt, scope=formats.get(fmt).scope_of_stack(w.shape[-2], stacked), amax=amax)


@dataclass(frozen=True, slots=True)
class _Held:
    """Carries a QTensor past autograd.Function.apply, which would take a tensor argument for a differentiable one."""

    tensor: QTensor


class _RoutedLinear(torch.autograd.Function):
    """``x`` (tokens, or rows in routed order) and the master of all experts to BF16 rows ``[R, N]``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        master: Tensor,
        bias: Tensor | None,
        routing: Routing,
        spec: LinearSpec,
        gather: bool,
        weight: "_Held",
    ) -> Tensor:
        w = weight.tensor
        quick = dispatch.fast(x.device, spec.weights, spec.activations, w.shape, spec.slices)
        rows = None if quick and spec.backward != "dequantized" else row_parts(x, spec.activations, spec.slices)
        if quick:
            y = StoredExpertLinear(w, bias)(x, routing, gather=gather)
        else:
            operand = row_operand(cast(Parts, rows), spec.activations, spec.slices)
            y = routed_linear(gathered(operand, routing) if gather else operand, w.operand(), bias, routing)
        ctx.routing, ctx.spec, ctx.gather = routing, spec, gather
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.master_dtype, ctx.master_shape = master.dtype, master.shape
        _save(ctx, x, rows, master, w)
        return y

    @staticmethod
    @once_differentiable  # a second derivative of rounded operands has no meaning: raise, never return half of one
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        routing, spec, grouped = ctx.routing, ctx.spec, dispatch.grouped(dy.device)
        saved = ctx.saved_tensors  # read once: checkpointing without reentry allows no second unpacking
        dy = dy.to(torch.bfloat16).contiguous()
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = _input_grad(ctx, saved, dy)
            if ctx.gather:
                dx = _over_slots(dx, routing)
        if ctx.needs_input_grad[1]:
            if spec.backward == "low_precision":
                dw = gradients_of(spec.weights).weight_grad(saved, dy, routing, ctx.master_dtype)
            else:
                dw = grouped.grouped_weight_grad(dy, _saved_rows(ctx, saved), routing, ctx.master_dtype)
            if spec.transposed:
                dw = dw.transpose(-1, -2)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            db = torch.zeros(routing.num_experts, dy.shape[1], dtype=torch.float32, device=dy.device)
            for expert, rows in routing.groups():
                db[expert] = dy[rows].float().sum(0)
            db = db.to(ctx.bias_dtype)
        return dx, dw, db, None, None, None, None


def _over_slots(dx: Tensor, routing: Routing) -> Tensor:
    """Gradient of a token's row: the float32 sum over its slots ``[R, K] -> [T, K]``, in ascending order, rounded to BF16 once."""
    if dispatch.kernels(dx.device) and dx.shape[1] % 2 == 0:
        from swapq.kernels.cuda import elementwise

        return elementwise.combine(dx.contiguous(), None, routing.top_k, position=routing.positions)
    return routing.scatter(dx).float().sum(1).to(torch.bfloat16)


def _save(ctx: Any, x: Tensor, rows: Parts | None, master: Tensor, w: QTensor) -> None:
    spec: LinearSpec = ctx.spec
    ctx.weight_meta = (w.format, w.scope, w.axis, w.source_dtype)
    if spec.backward == "high_precision":
        ctx.save_for_backward(master, x)
    elif spec.backward == "dequantized":
        ctx.save_for_backward(w.codes, w.scales, w.global_scale, *cast(Parts, rows))
    else:
        x = ctx.routing.gather(x) if ctx.gather else x
        ctx.save_for_backward(*gradients_of(spec.weights).save(x, master, w, ctx.routing))


def _bf16_master(master: Tensor, spec: LinearSpec) -> Tensor:
    w = master.to(torch.bfloat16)
    return w.transpose(-1, -2) if spec.transposed else w


def _input_grad(ctx: Any, saved: Sequence[Tensor], dy: Tensor) -> Tensor:
    """dgrad rows ``[R, K]`` in BF16 by the mode's table row."""
    spec, grouped = ctx.spec, dispatch.grouped(dy.device)
    if spec.backward == "dequantized":
        codes, scales, global_scale = saved[:3]
        fmt, scope, axis, dtype = ctx.weight_meta
        w = QTensor(codes, scales, fmt, scope, axis, dtype, global_scale).dequantize(torch.bfloat16)
        return grouped.grouped_input_grad(dy, w, ctx.routing)
    if spec.backward == "low_precision":
        return gradients_of(spec.weights).input_grad(saved, dy, ctx.routing, spec, ctx.weight_meta[1])
    return grouped.grouped_input_grad(dy, _bf16_master(saved[0], spec), ctx.routing)


def _saved_rows(ctx: Any, saved: Sequence[Tensor]) -> Tensor:
    """``x`` (high precision) or ``bf16(x_hat)`` (dequantized) in routed order."""
    spec: LinearSpec = ctx.spec
    high = spec.backward == "high_precision"
    x = saved[1] if high else row_values(Parts(*saved[3:]), spec.activations, spec.slices)
    return ctx.routing.gather(x) if ctx.gather else x


class TrainableExpertLinear:
    """An expert linear over a master: quantized in each forward, or once inside ``frozen_weights``.

    Args:
        master: ``[E, N, K]``, or ``[E, K, N]`` if the spec says transposed.
        bias: ``[E, N]`` or None.
        weight: the master's QTensor if it is frozen; None quantizes now.
    """

    def __init__(self, master: Tensor, bias: Tensor | None, spec: LinearSpec, weight: QTensor | None = None) -> None:
        self.master, self.bias, self.spec = master, bias, spec
        self.weight = (
            weight if weight is not None else quantize_weight(master, spec.weights, transposed=spec.transposed)
        )

    @classmethod
    def held(cls, weight: QTensor, bias: Tensor | None, spec: LinearSpec) -> "TrainableExpertLinear":
        """Over codes without a master: the gradient of the rows alone, that of mode ``dequantized``, the one mode that needs no master."""
        return cls(weight.codes, bias, replace(spec, backward="dequantized", transposed=False), weight)

    def __call__(self, x: Tensor, routing: Routing, *, gather: bool) -> Tensor:
        return _RoutedLinear.apply(x, self.master, self.bias, routing, self.spec, gather, _Held(self.weight))
