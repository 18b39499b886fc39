"""Where stacked experts live: a layer's codes and scales travel as one tensor per part and are copied into the live parameters.

The runtime layout is the checkpoint's, so a stack that this rank holds whole is one copy. Expert parallelism takes whole experts, tensor
parallelism the rank's slice of gate, of up and of down's columns, as vLLM's loader does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swapq import formats
from swapq.checkpoint.stacks import stack_names
from swapq_vllm.experts_method import SwapqExpertsMethod
from swapq_vllm.headers import Meta

__all__ = ["Shard", "Stack", "stacks_of"]

_PARAMETERS = {"up": "w13_", "down": "w2_"}


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of a stack.

    Attributes:
        experts: global numbers of the experts held, in the order in which they are held.
        total: how many there are on all ranks.
        axis: axis that tensor parallelism cuts, None where it cuts none (FP32 scales).
        halves: equal parts along ``axis`` that are cut one by one: gate and up.
        rank, ranks: place in the tensor-parallel group.
    """

    experts: tuple[int, ...]
    total: int
    axis: int | None
    halves: int = 1
    rank: int = 0
    ranks: int = 1

    @property
    def whole(self) -> bool:
        """Whether the rank holds the stack as it arrives."""
        return (self.axis is None or self.ranks == 1) and self.experts == tuple(range(self.total))

    def held(self, live: Tensor) -> list[Tensor]:
        """The regions of the live parameter that are filled one by one."""
        if self.axis is None or self.ranks == 1:
            return [live]
        return list(live.chunk(self.halves, self.axis))

    def of(self, arrived: Tensor) -> list[Tensor]:
        """What of a stack belongs into each of :meth:`held`."""
        mine = self._mine(arrived)
        if self.axis is None or self.ranks == 1:
            return [mine]
        size = mine.shape[self.axis] // (self.halves * self.ranks)
        return [mine.narrow(self.axis, (half * self.ranks + self.rank) * size, size) for half in range(self.halves)]

    def _mine(self, arrived: Tensor) -> Tensor:
        if self.experts == tuple(range(self.total)):
            return arrived
        first, count = self.experts[0] if self.experts else 0, len(self.experts)
        if self.experts == tuple(range(first, first + count)):
            return arrived.narrow(0, first, count)
        # a copy that blocks would wait for all that is queued, once for every stack
        mine = torch.tensor(self.experts, device="cpu").to(arrived.device, non_blocking=True)
        if arrived.element_size() == 1:  # not every device indexes float8
            return arrived.view(torch.uint8)[mine].view(arrived.dtype)
        return arrived[mine]


@dataclass(frozen=True, slots=True)
class Stack:
    """One part of one layer's experts.

    Attributes:
        name: what it is called on the wire.
        layer, parameter: the live tensor.
        meta: dtype and shape on the wire, all ranks' experts.
        shard: this rank's part.
        covers: checkpoint names of the tensors that it stands for.
    """

    name: str
    layer: nn.Module
    parameter: str
    meta: Meta
    shard: Shard
    covers: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Whether the live parameter is the stack, byte for byte."""
        return self.shard.whole


def stacks_of(model: nn.Module) -> dict[str, Stack]:
    """Wire name -> stack, of every layer of experts that holds codes."""
    found = {}
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, SwapqExpertsMethod):
            found.update({stack.name: stack for stack in _layer_stacks(layer, method)})
    return found


def prefix_of(method: SwapqExpertsMethod) -> str:
    """The experts' name in the checkpoint."""
    return next(iter(method.names.values())).rsplit(".", 3)[0]


def _layer_stacks(layer: Any, method: SwapqExpertsMethod) -> Iterator[Stack]:
    form, parallel = formats.get(method.format), method.moe.moe_parallel_config
    total = len({expert for expert, _ in method.names})
    where = [layer._map_global_expert_id_to_local_expert_id(e) for e in range(total)]
    held = tuple(e for _, e in sorted((local, e) for e, local in enumerate(where) if local != -1))
    for side, names in stack_names(prefix_of(method), form, gated=method.gated).items():
        halves = 2 if side == "up" and method.gated else 1
        shards = ("w2",) if side == "down" else ("w1", "w3") if method.gated else ("w1",)
        for part, name in names.items():
            parameter = _PARAMETERS[side] + form.suffixes[part]
            live: Tensor = getattr(layer, parameter)
            axis = None if part == "global_scale" else 2 if side == "down" else 1
            shard = Shard(held, total, axis, halves, parallel.tp_rank, parallel.tp_size)
            shape = [total, *live.shape[1:]]
            if axis is not None:
                shape[axis] *= parallel.tp_size
            covers = tuple(
                method.names[e, s].removesuffix("weight") + form.suffixes[part] for e in range(total) for s in shards
            )
            yield Stack(name, layer, parameter, Meta(live.dtype, tuple(shape)), shard, covers)
