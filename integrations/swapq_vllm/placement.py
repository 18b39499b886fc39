"""Where a checkpoint tensor lives in the engine: recorded from vLLM's own loaders, so it holds for every model, merge and shard."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from swapq_vllm.compat import on_meta
from swapq_vllm.headers import Meta
from swapq_vllm.unquantized import load_layout, reads_by_product

__all__ = ["Layouts", "Piece", "Placement", "trace"]


class Layouts:
    """Live tensors in the layout in which they were loaded. The last few are kept: all experts of a layer share one tensor."""

    def __init__(self, keep: int = 4) -> None:
        self.keep, self.recent = keep, OrderedDict[tuple[nn.Module, str], Tensor | None]()

    def get(self, layer: nn.Module, name: str) -> Tensor | None:
        key = (layer, name)
        if key not in self.recent:
            while len(self.recent) >= self.keep:
                self.recent.popitem(last=False)
            layout = load_layout(layer, name)
            self.recent[key] = None if layout is None else layout.detach().contiguous()
        return self.recent[key]


class Region(NamedTuple):
    """A part of a tensor: sizes, strides and offset in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: Tensor) -> "Region":
        return cls(tuple(view.shape), view.stride(), int(view.storage_offset()))

    def view(self, whole: Tensor) -> Tensor:
        return whole.as_strided(self.sizes, self.strides, whole.storage_offset() + self.offset)


class Piece(NamedTuple):
    """One copy that the loader makes: a region of the checkpoint tensor into a region of one live tensor."""

    layer: nn.Module
    name: str
    live: Region
    source: Region | None  # None: the loader changed the values before it copied them

    def held(self, layouts: Layouts) -> Tensor | None:
        """What the engine holds there; None where it cannot be read back."""
        whole = None if self.source is None else layouts.get(self.layer, self.name)
        return None if whole is None or whole.numel() == 0 else self.live.view(whole)

    def of(self, arrived: Tensor) -> Tensor:
        """What :meth:`held` should give after ``arrived``, a contiguous checkpoint tensor, was loaded."""
        part = arrived if self.source is None else self.source.view(arrived)
        part = part.to(getattr(self.layer, self.name).dtype)
        return part + 0.0 if self.loses_sign_of_zero else part

    @property
    def loses_sign_of_zero(self) -> bool:
        return reads_by_product(self.layer, self.name)


@dataclass
class Placement:
    """A checkpoint tensor and every place that it fills. No place: another rank's, or one that the model does not use."""

    meta: Meta
    pieces: list[Piece] = field(default_factory=list)

    @cached_property
    def whole(self) -> bool:
        """This rank holds every element of the tensor in one place, in the tensor's own order."""
        contiguous = torch.empty(self.meta.shape, device="meta").stride()
        return len(self.pieces) >= 1 and all(
            p.source is not None
            and p.source.offset == 0
            and p.source.strides[-len(contiguous) :] == contiguous[-len(p.source.strides) :]
            and _count(p.source.sizes) == _count(self.meta.shape)
            for p in self.pieces
        )

    def served(self, layouts: Layouts) -> Tensor | None:
        """The tensor as the engine holds it, in checkpoint layout; None where this rank cannot tell all of it."""
        held = self.held(layouts)
        return None if held is None else self.as_stored(held)

    def as_stored(self, held: Tensor) -> Tensor:
        """What the engine holds, in the checkpoint's dtype if that loses nothing."""
        if held.dtype == self.meta.dtype:
            return held
        back = held.to(self.meta.dtype)  # a model that widens a tensor holds the checkpoint's values
        return back if torch.equal(back.to(held.dtype), held) else held

    def held(self, layouts: Layouts) -> Tensor | None:
        """The tensor in the engine's own dtype, in the checkpoint's shape; None where this rank cannot tell all of it."""
        if self.whole:
            held = self.pieces[0].held(layouts)
            return None if held is None else held.reshape(self.meta.shape)
        parts = [(piece, piece.held(layouts)) for piece in self.pieces]
        if not parts or any(part is None for _, part in parts):
            return None
        first = parts[0][1]
        out = torch.empty(self.meta.shape, dtype=first.dtype, device=first.device)  # type: ignore[union-attr]
        seen = torch.zeros(self.meta.shape, dtype=torch.bool)
        for piece, part in parts:
            piece.source.view(out).copy_(part)  # type: ignore[union-attr, arg-type]
            piece.source.view(seen).fill_(True)  # type: ignore[union-attr]
        return out if bool(seen.all()) else None


def _count(sizes: tuple[int, ...]) -> int:
    return int(torch.Size(sizes).numel())


class _Recorder(TorchDispatchMode):
    """Notes every copy into a live tensor, and which checkpoint tensor it came from."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.owners: dict[int, tuple[nn.Module, str]] = {}
        for layer in model.modules():
            for name, tensor in [*layer._parameters.items(), *layer._buffers.items()]:
                if tensor is not None:
                    self.owners[_storage(tensor)] = (layer, name)
        self.sources: dict[int, str] = {}
        self.alive: list[Tensor] = []  # a freed storage's address could be used again
        self.current = ""
        self.placements: dict[str, Placement] = {}

    def feed(self, entries: Iterable[tuple[str, Meta]]) -> Iterator[tuple[str, Tensor]]:
        for name, meta in entries:
            scalar = _count(meta.shape) == 1  # loaders may read a scalar's value
            tensor = torch.empty(meta.shape, dtype=meta.dtype, device="cpu" if scalar else "meta")
            self.placements[name] = Placement(meta)
            self.sources[_storage(tensor)] = self.current = name
            self.alive.append(tensor)
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            into, source = args[0], args[1]
            owner = self.owners.get(_storage(into))
            if owner is not None:
                name = self.sources.get(_storage(source))
                region = None if name is None else Region.of(source)
                self.placements[name or self.current].pieces.append(Piece(*owner, Region.of(into), region))
        if func._schema.is_mutable and self._is_live(args):
            return args[0]  # vLLM leaves biases off the meta device; what is served is never written here
        return func(*args, **(kwargs or {}))

    def _is_live(self, args: tuple[Any, ...]) -> bool:
        into = args[0] if args else None
        return isinstance(into, Tensor) and not into.is_meta and _storage(into) in self.owners


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def trace(model: nn.Module, entries: Iterable[tuple[str, Meta]]) -> dict[str, Placement]:
    """Placements of checkpoint tensors, found by letting ``model`` load them on the meta device.

    Args:
        model: a vLLM model whose weights are loaded.
        entries: name, dtype and shape of every tensor of the checkpoint.
    """
    with on_meta(model), torch.no_grad():
        recorder = _Recorder(model)
        with recorder:
            model.load_weights(recorder.feed(entries))  # type: ignore[operator]
    return recorder.placements
