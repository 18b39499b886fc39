"""The sending end of the weight sync: a model's tensors, under checkpoint names, as the engine's checkpoint holds them.

A server reads tensors after the optimizer has moved on, so what is sent to one is fresh storage, never a view of a parameter. An engine in
this process has taken a tensor over before it asks for the next, and takes quantized experts stacked: one tensor per part and layer.
"""

from collections.abc import Callable, Container, Generator, Iterator
from typing import Any

import torch
from torch import nn

from swapq.checkpoint.tensors import checkpoint_tensors
from swapq.convert import is_converted
from swapq.digest import Digests
from swapq.errors import UnsupportedError
from swapq.formats import is_scale
from swapq.saving_rules import as_saved
from swapq_trl.adapters import Merge, is_adapted, merged

__all__ = ["NamedTensors", "Sending", "as_packed", "as_sent", "plain_model", "sent_tensors", "with_digests"]

NamedTensors = Iterator[tuple[str, torch.Tensor]]
#: named tensors that can be closed before their end
Sending = Generator[tuple[str, torch.Tensor], None, None]


def plain_model(model: Any) -> Any:
    """The transformers model inside PEFT's wrapper, or the model itself."""
    return model.get_base_model() if is_adapted(model) else model


def sent_tensors(
    model: nn.Module,
    dtype: torch.dtype,
    *,
    flattened: Callable[[], NamedTensors] | None = None,
    merge: Merge | None = None,
    stacked: Container[str] = (),
    fresh: bool = True,
) -> NamedTensors:
    """Checkpoint name and tensor of everything the engine must hold, the same names, dtypes and shapes every time.

    Args:
        model: the trainer's model; converted by `swapq.convert` or not, wrapped by PEFT or not, sharded by FSDP2 or not.
        dtype: what the engine keeps unquantized weights in. Float32 masters are sent in it, at half the bytes.
        flattened: an iterator over whole parameters, where the model's own are flattened or partitioned (FSDP1, ZeRO-3).
        merge: filled with what merging an adapter found out.
        stacked: hub prefixes of experts that the engine takes as stacks (``swapq.checkpoint.stacks``).
        fresh: every tensor has storage of its own. Without it, one may be a view that is right until the next is asked for.

    Raises:
        UnsupportedError: a converted model whose parameters are flattened or partitioned.
    """
    if flattened is not None:
        if is_converted(model):
            raise UnsupportedError(
                "the parameters of a converted model are flattened or partitioned (FSDP1, ZeRO-3), so its codes cannot "
                "be computed; use FSDP2 (`fsdp_version: 2` in the Accelerate configuration) or DDP"
            )
        parameters = {name: _fresh(name, parameter, dtype, ()) for name, parameter in flattened()}
        yield from as_saved(plain_model(model), parameters).items()
        return
    with merged(model, merge) as plain:
        yield from as_sent(plain, checkpoint_tensors(plain, stacked=stacked), dtype, fresh=fresh)


def as_sent(plain: nn.Module, tensors: NamedTensors, dtype: torch.dtype, *, fresh: bool = True) -> NamedTensors:
    """Checkpoint tensors of `plain` in the dtypes in which they are sent; `fresh`: copies."""
    kept = _kept_in_float32(plain)
    for name, tensor in tensors:
        yield name, _fresh(name, tensor, dtype, kept, copy=fresh)


def as_packed(tensors: NamedTensors) -> NamedTensors:
    """`tensors` as vLLM's packed transfer can unpack them: it gives a scalar no shape back (``view(*[])``), so one goes over as ``[1]``."""
    for name, tensor in tensors:
        yield name, tensor if tensor.dim() else tensor.reshape(1)


def with_digests(tensors: NamedTensors, digests: Digests) -> Sending:
    """`tensors` unchanged, each added to `digests` as it passes. Nothing waits for the device here, so that what the receiver does next is
    queued behind it."""
    for name, tensor in tensors:
        digests.add(name, tensor)
        yield name, tensor


def _fresh(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, kept: tuple[str, ...], *, copy: bool = True
) -> torch.Tensor:
    """A copy that shares no storage with the model; float32 weights in the engine's dtype, except those kept in float32."""
    lower = tensor.dtype == torch.float32 and not is_scale(name) and not any(part in name for part in kept)
    return tensor.detach().to(dtype if lower else tensor.dtype, copy=copy, memory_format=torch.contiguous_format)


def _kept_in_float32(model: nn.Module) -> tuple[str, ...]:
    """Parts of names that the model's class keeps in float32, routers' correction biases for example."""
    names: set[str] = set()
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        names.update(getattr(model, attribute, None) or ())
    return tuple(sorted(names))
