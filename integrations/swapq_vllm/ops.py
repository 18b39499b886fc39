"""The plugin's custom ops: the trainer's expert block and linear, opaque to torch.compile, with weights passed as flat tensors.

On a Hopper GPU experts and linears run on kernels that a CUDA graph can hold. Where they do not reach (slices of ``expert_tp``, other
GPUs, odd shapes) the bodies run torch code whose routing reads token counts on the host: right, but it synchronizes and
cannot be captured; the methods of experts and linears say so when the engine starts.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from swapq import formats
from swapq.formats import Operand, Parts
from swapq.kernels import dispatch
from swapq.kernels.routing import Routing
from swapq.nn.expert_block import FrozenExpertLinear, expert_block
from swapq.nn.gate import Gate, activation_table

__all__ = ["KERNELS_TAKE", "capturable", "routed_experts", "stacked_linear"]


#: what :func:`swapq.kernels.dispatch.fast` wants, for messages
KERNELS_TAKE = (
    "a Hopper GPU, rows in the format of the weights or BF16 beside INT4, sizes that are multiples of 32, or of 16 in FP8 block "
    "and INT4"
)


def capturable(
    device: torch.device, stored: str, activations: str, act: str, gated: bool, *shapes: Sequence[int]
) -> bool:
    """Whether experts with weights of these ``shapes`` run on kernels that a CUDA graph can hold."""
    return gated and all(dispatch.fast(device, stored, activations, shape) for shape in shapes)


@lru_cache(maxsize=16)
def _gate(act: str, gated: bool) -> Gate:
    return Gate(act, gated=gated)


def _operand(weight: list[Tensor], stored: str) -> Operand:
    """Operand from expanded values and scale (``stored == ""``), or from the parts of ``stored``, ``fmt`` or ``fmt:scope``."""
    if not stored:
        return Operand(weight[0], weight[1] if len(weight) > 1 else None)
    name, _, scope = stored.partition(":")
    form = formats.get(name)
    return form.operand(form.loaded(Parts(*weight)), scope=scope or form.default_scope, axis=-1)


def _logical(weight: list[Tensor], stored: str) -> tuple[int, ...]:
    return formats.get(stored.partition(":")[0]).logical_shape(weight[0])


def _local(ids: Tensor, expert_map: Tensor) -> Tensor:
    """Local ids, -1 where a global id is not here or none at all: an index of -1 would be the last expert."""
    known = (ids >= 0) & (ids < expert_map.shape[0])
    return torch.where(known, expert_map[ids.where(known, 0)], -1)


@torch.library.custom_op("swapq::routed_experts", mutates_args=())
def routed_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    gate_up: list[Tensor],
    down: list[Tensor],
    stored: str,
    activations: str,
    act: str,
    gated: bool,
) -> Tensor:
    """The expert block over the experts that this rank holds.

    Args:
        x: BF16 ``[T, H]``.
        topk_weights, topk_ids: ``[T, k]``, global expert ids.
        expert_map: global to local id, -1 for another rank's expert; None where all are here.
        gate_up, down: see ``stored``.
        stored: ``""``: values ``[E, N, K]`` and, if there is one, scale ``[E]`` or ``[E, N, ceil(K/128)]``. A format's name: codes, scales,
            FP32 scale, as they are stored; ``fmt:scope`` where gate and up are in another scope than the default.
        activations: format of the rows.
        act, gated: the gate.
    """
    name, _, scope = stored.partition(":")
    if stored and capturable(
        x.device, name, activations, act, gated, _logical(gate_up, stored), _logical(down, stored)
    ):
        from swapq.kernels import fast

        return fast.stored_block(
            x.to(torch.bfloat16).contiguous(),
            topk_ids.contiguous(),
            topk_weights.float().contiguous(),
            Parts(*gate_up),
            Parts(*down),
            name,
            activation_table(act, x.device),
            scope=scope or None,
            local_of=None if expert_map is None else expert_map.to(torch.int32),
        )
    ids = topk_ids if expert_map is None else _local(topk_ids.to(torch.int64), expert_map)
    first, second = _operand(gate_up, stored), _operand(down, name)
    return expert_block(
        x,
        ids,
        topk_weights,
        FrozenExpertLinear(*first, activations),
        FrozenExpertLinear(*second, activations),
        num_experts=first.values.shape[0],
        gate=_gate(act, gated),
    )


@routed_experts.register_fake
def _(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    gate_up: list[Tensor],
    down: list[Tensor],
    stored: str,
    activations: str,
    act: str,
    gated: bool,
) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.bfloat16)


@torch.library.custom_op("swapq::stacked_linear", mutates_args=())
def stacked_linear(x: Tensor, weight: list[Tensor], bias: Tensor | None, stored: str, activations: str) -> Tensor:
    """``x [..., K]`` through one quantized linear, BF16 ``[..., N]``. Weights as in :func:`routed_experts`, without the expert axis."""
    if stored and dispatch.fast(x.device, stored, activations, _logical(weight, stored)):
        from swapq.kernels import fast

        return fast.dense_linear(x, Parts(*weight), stored, bias)
    values, scale = _operand(weight, stored)
    linear = FrozenExpertLinear(
        values[None], None if scale is None else scale[None], activations, None if bias is None else bias[None]
    )
    rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    y = linear(rows, Routing.single(rows.shape[0], x.device), gather=False)
    return y.reshape(*x.shape[:-1], y.shape[-1])


@stacked_linear.register_fake
def _(x: Tensor, weight: list[Tensor], bias: Tensor | None, stored: str, activations: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight[0].shape[-2]), dtype=torch.bfloat16)
