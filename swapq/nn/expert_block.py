"""The expert block: the one function that trainer and rollout engine both call (contract section 4).

Invariant: a token's output is a function of that token, its experts and the weights alone, bit for bit.
"""

from typing import Protocol

import torch
from torch import Tensor

from swapq import formats
from swapq.formats import Operand, Parts
from swapq.formats.fp8_block import BLOCK
from swapq.kernels import dispatch, sliced
from swapq.kernels.routing import Routing
from swapq.nn.combine import combine
from swapq.nn.gate import Gate
from swapq.qtensor import QTensor

__all__ = [
    "ExpertLinear",
    "FrozenExpertLinear",
    "StoredExpertLinear",
    "expert_block",
    "gathered",
    "routed_linear",
    "row_operand",
    "row_parts",
    "row_values",
]


class ExpertLinear(Protocol):
    """One linear of all experts: the trainer's quantizes its master in each forward, the engine's holds operands."""

    def __call__(self, x: Tensor, routing: Routing, *, gather: bool) -> Tensor:
        """BF16 rows ``[R, N]`` from ``x``: ``[T, K]`` tokens if ``gather`` (quantized once, then routed), else rows ``[R, K]``."""
        ...


def row_parts(x: Tensor, activations: str, slices: int = 1) -> Parts:
    """Codes and scales of BF16 rows ``x [M, K]``; rows that stay BF16 are their own codes.

    With ``slices`` (expert tensor parallelism) each K/slices long piece of a row is a row of its own: ``[M, slices, K/slices]``.
    """
    if activations == "bf16":
        return Parts(x, x.new_empty(0))
    form, scope = formats.get(activations), _row_scope(activations)
    parts = dispatch.quantize(x, activations, scope, -1, None) if slices == 1 else None
    return parts or form.quantize(x.unflatten(-1, (slices, -1)) if slices > 1 else x, scope=scope, axis=-1)


def row_operand(parts: Parts, activations: str, slices: int = 1) -> Operand:
    """Operand of :func:`row_parts`: values ``[M, K]``, scale None, ``[M]``, ``[M, slices]``, or one per block of K (``fp8_block``)."""
    if activations == "bf16":
        return Operand(parts.codes, None)
    values, scale = formats.get(activations).operand(parts, scope=_row_scope(activations), axis=-1)
    if scale is not None and scale.dim() == 0:  # tensor scope: every row has the one scale
        scale = scale.expand(values.shape[0])
    if slices == 1:
        return Operand(values, scale)
    return Operand(values.flatten(-2), scale.flatten(-2) if scale is not None and scale.dim() > 2 else scale)


def row_values(parts: Parts, activations: str, slices: int = 1) -> Tensor:
    """``bf16(x_hat)``: the dequantized rows ``[M, K]``."""
    if activations == "bf16":
        return parts.codes
    scope = _row_scope(activations)
    values = dispatch.dequantize(parts, activations, scope, -1)
    if values is None:
        values = formats.get(activations).dequantize(parts, scope=scope, axis=-1).to(torch.bfloat16)
    return values.flatten(-2) if slices > 1 else values


def _row_scope(activations: str) -> str:
    return formats.get(activations).row_scope


def routed_linear(x: Operand, w: Operand, bias: Tensor | None, routing: Routing) -> Tensor:
    """Contract section 3 (section 7 where scales change along K) for rows sorted by expert.

    Args:
        x: values ``[R, K]``, scale ``[R]``, ``[R, slices]`` or None; ``[R, ceil(K/128)]`` beside such a ``w``.
        w: values ``[E, N, K]``, scale ``[E]`` or None; ``[E, N, ceil(K/128)]`` in ``fp8_block``.
        bias: ``[E, N]`` or None; added in float32 before the one rounding to BF16.

    Returns:
        BF16 ``[R, N]``.
    """
    forward = dispatch.grouped(x.values.device).grouped_forward
    if w.scale is not None and w.scale.dim() == 3:
        y = sliced.grouped_forward(x, w, routing, sliced.spans(x.values.shape[-1], BLOCK))
    elif x.scale is not None and x.scale.dim() == 2:
        slices = x.scale.shape[1]
        y = torch.zeros((), device=x.values.device)
        for xs, ws, row_scale in zip(
            x.values.chunk(slices, -1), w.values.chunk(slices, -1), x.scale.unbind(-1), strict=True
        ):
            y = y + _scaled(forward(xs, ws, routing), row_scale, w.scale, routing)
    else:
        y = _scaled(forward(x.values, w.values, routing), x.scale, w.scale, routing)
    if bias is not None:
        y = y + _per_row(bias.to(torch.bfloat16).float(), routing)
    return y.to(torch.bfloat16)


def _per_row(per_expert: Tensor, routing: Routing) -> Tensor:
    counts = torch.tensor(routing.counts, device=per_expert.device)
    return per_expert.repeat_interleave(counts, dim=0)


def _scaled(acc: Tensor, row_scale: Tensor | None, expert_scale: Tensor | None, routing: Routing) -> Tensor:
    if row_scale is None and expert_scale is None:
        return acc
    scale = None if expert_scale is None else _per_row(expert_scale, routing)
    if row_scale is not None:
        scale = row_scale if scale is None else row_scale * scale
    return acc if scale is None else acc * scale[:, None]


class FrozenExpertLinear:
    """An expert linear over fixed operands: what the engine runs between two weight updates.

    Args:
        values: ``[E, N, K]`` exact operand values; BF16, or float64 copies kept to save the conversion.
        scale: float32 ``[E]`` or None.
        activations: format of the rows, or ``"bf16"``.
        bias: ``[E, N]`` or None.
        slices: slices of K with row scales of their own (``expert_tp`` of a whole down projection).
    """

    def __init__(
        self, values: Tensor, scale: Tensor | None, activations: str, bias: Tensor | None = None, *, slices: int = 1
    ) -> None:
        self.weight = Operand(values, scale)
        self.activations, self.bias, self.slices = activations, bias, slices

    def __call__(self, x: Tensor, routing: Routing, *, gather: bool) -> Tensor:
        operand = row_operand(row_parts(x, self.activations, self.slices), self.activations, self.slices)
        return routed_linear(gathered(operand, routing) if gather else operand, self.weight, self.bias, routing)


class StoredExpertLinear:
    """An expert linear over codes and scales that the GPU's kernels read as they are stored; the bits of the trainer's forward.

    Args:
        weight: ``[E, N, K]``, in a format and shape that :func:`swapq.kernels.dispatch.fast` accepts.
        bias: ``[E, N]`` or None.
    """

    def __init__(self, weight: QTensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor, routing: Routing, *, gather: bool) -> Tensor:
        from swapq.kernels import fast

        w = self.weight
        return fast.routed_rows(x, w.parts, w.format, w.scope, self.bias, routing, gather=gather)


def gathered(operand: Operand, routing: Routing) -> Operand:
    """The operand's rows in routed order."""
    return Operand(routing.gather(operand.values), None if operand.scale is None else routing.gather(operand.scale))


def expert_block(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    *,
    num_experts: int,
    gate: Gate,
) -> Tensor:
    """Tokens through their experts.

    Args:
        hidden_states: ``[T, H]``; rounded to BF16 on entry.
        top_k_index: integer ``[T, k]``; ids outside ``0 .. num_experts-1`` (another rank's) contribute nothing.
        top_k_weights: ``[T, k]``, used in float32.

    Returns:
        BF16 ``[T, H]``: the sum over the chosen experts in float32, in ascending slot order, rounded once.
    """
    routing = Routing.of(top_k_index, num_experts)
    x = hidden_states.to(torch.bfloat16)
    rows = down(gate(gate_up(x, routing, gather=True)), routing, gather=False)
    return combine(rows, top_k_index, top_k_weights, routing)
