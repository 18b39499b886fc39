"""QuantizedStorage: how a module keeps codes and scales as plain Parameters, and masters frozen for a while.

Invariant: codes and scales move between devices and into files as bytes; no ``.to(dtype)``, ``.half()`` or ``.bfloat16()`` casts them.
Codes and block scales live as uint8, so that every library that moves, gathers or saves tensors leaves them alone.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from swapq import formats
from swapq.errors import CheckpointError
from swapq.formats import Format, Parts
from swapq.nn.functional import LinearSpec
from swapq.qtensor import QTensor

__all__ = ["QuantizedStorage", "part_names"]


def part_names(weight: str) -> dict[str, str]:
    """Parameter name of each part of the weight called ``weight``: ``gate_up_proj_codes``, ``gate_up_proj_scales``, ...

    None ends as a checkpoint's scales do: transformers maps ``gate_proj.weight_global_scale`` to ``gate_up_proj_global_scale``, and
    would fill a parameter of that name itself.
    """
    return {"codes": f"{weight}_codes", "scales": f"{weight}_scales", "global_scale": f"{weight}_fp32_scale"}


def _as_kept(given: Tensor, form: Format, part: str, name: str) -> Tensor:
    stored = form.dtypes[part]
    kept = stored if stored == torch.float32 else torch.uint8
    if given.dtype == kept:
        return given
    e8m0 = part == "scales" and stored == torch.uint8 and given.dtype == torch.float8_e8m0fnu
    if given.dtype == stored or e8m0:
        return given.view(torch.uint8)
    raise CheckpointError(
        f"{name} is {given.dtype}, expected {kept}: {form.name} {part} are bytes, which a conversion would change; load the state "
        "dict of a model converted by the same recipe"
    )


class QuantizedStorage(nn.Module):
    """Mixin of the swapped modules."""

    spec: LinearSpec
    #: whether the weights are masters; else codes and scales stand in their place
    trainable: bool
    #: weight name -> (format, scope, dtype it came from) of weights held as codes
    stored: dict[str, tuple[str, str, torch.dtype]]
    #: weight name -> QTensor inside ``frozen_weights``
    frozen: "dict[str, QTensor] | None"

    def _init_storage(self) -> None:
        self.stored, self.frozen = {}, None

    @property
    def trains_in_bf16(self) -> bool:
        """Whether a forward leaves the masters as they are: the format is the rollout's alone."""
        return self.trainable and self.spec.backward == "bf16"

    def weight_names(self) -> tuple[str, ...]:
        """Names of the weights that this module quantizes, as its parameters spell them."""
        raise NotImplementedError

    def hub_weights(self) -> list[str]:
        """Checkpoint names of the weights that this module quantizes."""
        raise NotImplementedError

    def quantized(self) -> dict[str, QTensor]:
        """Weight name -> QTensor of what a forward would use now."""
        raise NotImplementedError

    def current(self, weight: str) -> QTensor:
        """What a forward would use now of one weight."""
        return self.quantized()[weight]

    def freeze(self) -> None:
        """Replace masters by codes and scales."""
        raise NotImplementedError

    def allocate(self) -> None:
        """Replace masters by uninitialized codes and scales, on the masters' devices, for a loader to fill."""
        raise NotImplementedError

    def _store(self, weight: str, q: QTensor) -> None:
        """Replace the master called ``weight`` by the parts of ``q``, as Parameters that never train."""
        self.stored[weight] = (q.format, q.scope, q.source_dtype)
        self._parameters.pop(weight)
        names = part_names(weight)
        for part, tensor in q.stored_parts().items():
            raw = tensor if tensor.dtype == torch.float32 else tensor.contiguous().view(torch.uint8)
            self.register_parameter(names[part], nn.Parameter(raw.contiguous(), requires_grad=False))

    def _allocate(self, weight: str, fmt: str, *, transposed: bool = False, stacked: int = 1) -> None:
        form, master = formats.get(fmt), getattr(self, weight)
        shape = (*master.shape[:-2], *master.shape[:-3:-1]) if transposed else tuple(master.shape)
        scope = form.scope_of_stack(shape[-2], stacked)
        shapes = form.part_shapes(shape, scope=scope)
        parts = {
            part: torch.empty(shapes[part], dtype=dtype, device=master.device) for part, dtype in form.dtypes.items()
        }
        loaded = form.loaded(Parts(parts["codes"], parts["scales"], parts.get("global_scale")))
        self._store(weight, QTensor(*loaded[:2], fmt, scope, -1, torch.bfloat16, loaded.global_scale))

    def stored_parts(self, weight: str) -> dict[str, Tensor]:
        """Parts of a weight as they lie in files and on the wire; of a module that holds codes, views of what it holds."""
        if weight not in self.stored:
            return self.current(weight).stored_parts()
        form, names = formats.get(self.stored[weight][0]), part_names(weight)
        return {part: self._viewed(names[part], dtype) for part, dtype in form.dtypes.items()}

    def _viewed(self, name: str, dtype: torch.dtype) -> Tensor:
        raw: Tensor = getattr(self, name)
        return raw.data if raw.dtype == dtype else raw.data.view(dtype)

    def _stored(self, weight: str) -> QTensor:
        fmt, scope, dtype = self.stored[weight]
        parts = self.stored_parts(weight)
        held = formats.get(fmt).loaded(Parts(parts["codes"], parts["scales"], parts.get("global_scale")))
        return QTensor(held.codes, held.scales, fmt, scope, -1, dtype, held.global_scale)

    def _frozen_or(self, weight: str, make: Callable[[], QTensor]) -> QTensor:
        if self.frozen is None:
            return make()
        if weight not in self.frozen:
            with torch.inference_mode(False):  # the same bytes serve a later step that trains
                self.frozen[weight] = make()
        return self.frozen[weight]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        kept = {
            name: p
            for weight in self.stored
            for name in part_names(weight).values()
            if (p := self._parameters.get(name)) is not None and p.dtype == torch.float32
        }
        shapes = {name: p.shape for name, p in kept.items()}
        for p in kept.values():
            p.data = p.data.reshape(-1).view(torch.uint8)
        try:
            super()._apply(fn, recurse)
        finally:  # a move that fails half way (out of memory) must not leave scales that are bytes
            for name, shape in shapes.items():
                p = self._parameters[name]
                if p is not None:
                    p.data = p.data.view(torch.float32).reshape(shape)
        if self.frozen is not None:
            self.frozen.clear()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Codes and scales load as bytes or not at all: ``copy_`` from another dtype would convert the numbers."""
        for weight, (fmt, _, _) in self.stored.items():
            for part, name in part_names(weight).items():
                given = state_dict.get(prefix + name)
                if isinstance(given, Tensor):
                    state_dict[prefix + name] = _as_kept(given, formats.get(fmt), part, prefix + name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["frozen"] = None
        return state
