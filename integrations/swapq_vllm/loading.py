"""Guards of the weight loaders: a parameter takes only tensors of its own dtype and shape, and notes each part that it got.

Torch's ``copy_`` converts silently: BF16 into uint8 truncates, E8M0 into uint8 turns 127 into 1. vLLM materializes parameters
uninitialized in every update and does not count what a quantized checkpoint lacks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor

from swapq.errors import CheckpointError

__all__ = ["Arrivals", "guard_experts", "guard_linear", "guard_tiles"]

Slot = tuple[Any, ...]


class Arrivals:
    """Which parts of a layer's parameters have been loaded.

    A parameter object lives for one load (each update materializes new ones), so parts of an update that failed are not
    counted for the next.
    """

    def __init__(self, expected: Mapping[Slot, str]) -> None:
        #: part of a parameter (an expert's half, a shard of a merged linear) -> checkpoint name of the weight
        self.expected = dict(expected)
        self._seen: dict[str, tuple[ref[Tensor], set[Slot]]] = {}

    def note(self, name: str, parameter: Tensor, slot: Slot) -> None:
        """``slot`` of the parameter called ``name`` got its bytes."""
        known = self._seen.get(name)
        if known is None or known[0]() is not parameter:
            known = self._seen[name] = (ref(parameter), set())
        known[1].add(slot)

    def require(self, layer: Any, wanted: Mapping[str, Iterable[Slot]]) -> None:
        """Raise unless every slot of every parameter was loaded, and forget what was.

        Args:
            layer: the layer whose parameters are asked about.
            wanted: parameter name to its slots.

        Raises:
            CheckpointError: naming tensors that did not come.
        """
        missing = []
        for name, slots in wanted.items():
            known = self._seen.pop(name, None)
            seen = known[1] if known is not None and known[0]() is getattr(layer, name) else set()
            suffix = _suffix(name)
            missing += [self.expected[slot] + suffix for slot in slots if slot not in seen]
        if missing:
            more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
            raise CheckpointError(
                f"{len(missing)} tensors were not loaded: {', '.join(missing[:6])}{more}; "
                "load or send every tensor of the layer, every time"
            )


def _suffix(parameter: str) -> str:
    """``w13_weight_scale`` -> ``_scale``: what a checkpoint appends to the weight's name."""
    return parameter.rpartition("weight")[2]


def _refuse(weight: str, parameter: str, loaded: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> NoReturn:
    raise CheckpointError(
        f"{weight}{_suffix(parameter)}: got {loaded.dtype} {list(loaded.shape)}, the layer takes {dtype} {list(shape)}; "
        "nothing is cast or cut: export or send the checkpoint again"
    )


def _name_of(layer: Any, parameter: Tensor) -> str:
    return next(name for name, tensor in layer._parameters.items() if tensor is parameter)


def guard_experts(
    layer: Any, arrivals: Arrivals, shapes: Mapping[tuple[str, str], tuple[int, ...]]
) -> Callable[..., Any]:
    """Weight loader for the parameters of a routed-experts layer.

    Args:
        layer: the layer.
        arrivals: expected slots are ``(global expert, "w1" | "w2" | "w3")``.
        shapes: ``(parameter, shard)`` to the shape of one expert's whole tensor.
    """

    def load(
        layer: Any,
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        name, slot = _name_of(layer, param), (expert_id, shard_id)
        weight = arrivals.expected.get(slot)
        if weight is None:
            raise CheckpointError(f"{weight_name}: the checkpoint's list has no expert {expert_id}, part {shard_id}")
        shape = shapes[name, shard_id]
        if shape == () and tuple(loaded_weight.shape) == (1,):
            loaded_weight = loaded_weight.reshape(())  # a server's packed transfer has no scalars
        if loaded_weight.dtype != param.dtype or tuple(loaded_weight.shape) != shape:
            _refuse(weight, name, loaded_weight, param.dtype, shape)
        done = type(layer).weight_loader(
            layer, param, loaded_weight, weight_name, shard_id, expert_id, return_success=True
        )
        if done and not param.is_meta:
            arrivals.note(name, param, slot)
        return done if return_success else None

    # bound to the layer: vLLM drops such references from what it keeps for reloading, so a deleted model is freed
    load.supports_moe_loading = True  # type: ignore[attr-defined]
    return MethodType(load, layer)


def guard_linear(layer: Any, arrivals: Arrivals, columns: Mapping[str, int]) -> Callable[..., Any]:
    """Weight loader for the parameters of a linear, merged or not.

    Args:
        layer: the layer.
        arrivals: expected slots are ``(shard id,)``, ``(None,)`` for a linear that is not merged.
        columns: parameter name to the length of its last axis before sharding.
    """

    def load(layer: Any, param: Tensor, loaded_weight: Tensor, *shard: Any) -> None:
        name, slot = _name_of(layer, param), (shard[0] if shard else None,)
        slots = [slot] if slot in arrivals.expected else list(arrivals.expected) if slot == (None,) else []
        weight = arrivals.expected[slots[0]] if slots else f"{getattr(layer, 'prefix', 'linear')} shard {slot[0]}"
        shape = (loaded_weight.shape[0] if loaded_weight.dim() else 0, columns[name])
        if not slots or loaded_weight.dtype != param.dtype or tuple(loaded_weight.shape) != shape:
            _refuse(weight, name, loaded_weight, param.dtype, shape)
        try:
            type(layer).weight_loader(layer, param, loaded_weight, *shard)
        except (AssertionError, RuntimeError) as error:
            raise CheckpointError(
                f"{weight}{_suffix(name)}: {list(loaded_weight.shape)} does not fit the layer ({error}); "
                "check that config.json belongs to this checkpoint"
            ) from error
        if not param.is_meta:
            for each in slots:
                arrivals.note(name, param, each)

    return MethodType(load, layer)


def guard_tiles(layer: Any, arrivals: Arrivals, tiles: Sequence[int]) -> Callable[..., Any]:
    """Weight loader for scales that several rows share. vLLM's own places them by rows of the weight.

    Args:
        layer: the layer.
        arrivals: expected slots are ``(shard id,)``, ``(None,)`` for a linear that is not merged.
        tiles: rows of scales that each shard has on this rank.
    """

    def load(layer: Any, param: Tensor, loaded_weight: Tensor, *shard: Any) -> None:
        name, slot = _name_of(layer, param), (shard[0] if shard else None,)
        slots = list(arrivals.expected)
        if slot not in arrivals.expected or loaded_weight.dtype != param.dtype or loaded_weight.dim() != 2:
            weight = arrivals.expected.get(slot, f"{getattr(layer, 'prefix', 'linear')} shard {slot[0]}")
            _refuse(weight, name, loaded_weight, param.dtype, tuple(param.shape))
        index = slots.index(slot) if len(tiles) > 1 else 0
        rows, columns = tiles[index], param.shape[1]
        rank = getattr(layer, "tp_rank", 0)
        head = rank // getattr(layer, "num_kv_head_replicas", 1) if slot[0] in ("k", "v") else rank
        part = loaded_weight
        for dim, size, place in ((0, rows, head), (1, columns, rank)):
            if part.shape[dim] != size:
                if part.shape[dim] % size or part.shape[dim] < (place + 1) * size:
                    _refuse(arrivals.expected[slot], name, loaded_weight, param.dtype, (rows, columns))
                part = part.narrow(dim, place * size, size)
        param.data.narrow(0, sum(tiles[:index]), rows).copy_(part)
        if not param.is_meta:
            arrivals.note(name, param, slot)

    return MethodType(load, layer)
