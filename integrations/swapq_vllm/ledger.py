"""The books of one update: what should arrive, what did, and whether the engine holds it.

Bytes are compared by digests that are computed where the tensors lie; the host waits for them once, at the end of the update.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from swapq.digest import Digests
from swapq.errors import SwapqError, SyncError
from swapq.formats import is_scale
from swapq_vllm.headers import Meta
from swapq_vllm.placement import Layouts, Piece, Placement
from swapq_vllm.served import Served
from swapq_vllm.stacks import Stack

__all__ = ["Ledger"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Arrival(NamedTuple):
    """What is known of a tensor that arrived.

    Attributes:
        target: where it belongs; of a copy that the engine does not hold (a tied head) where the other one lies, None if that is not known.
        tensors: how many tensors of the checkpoint it is.
        trusted: it was not digested on arrival: what the engine holds of it is compared with the sender's digest instead.
        places: the regions of live tensors into which it was copied, None if it went through vLLM's loaders.
    """

    target: Stack | Placement | None
    tensors: int
    trusted: bool
    places: list[Tensor] | None = None


class Ledger:
    """Checks an update while it streams by, copies what may be copied, and compares what the engine holds afterwards."""

    def __init__(self, served: Served, expected: Mapping[str, str] | None) -> None:
        self.served, self.expected = served, expected
        self.arrived: dict[str, Arrival] = {}
        self._split: set[str] = set()  # stacks of which a tensor came by itself
        self.copied: dict[int, nn.Module] = {}
        self._ways: dict[int, bool] = {}  # layer of experts -> whether they come stacked
        self.bytes = 0
        self.current = "the first tensor"
        self._digests = Digests()

    @property
    def tensors(self) -> int:
        """How many tensors of the checkpoint arrived."""
        return sum(arrival.tensors for arrival in self.arrived.values())

    def stream(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Check each of ``tensors`` and copy it into the engine, or give on a copy of it for vLLM's loaders (the sender may reuse its
        buffer); at the end, whether all arrived."""
        for name, tensor in tensors:
            self.current = name
            target = self._expected_target(name, tensor)
            self._require_one_way(name, target)
            tensor = tensor.detach().contiguous()
            self.bytes += tensor.numel() * tensor.element_size()
            count = len(target.covers) if isinstance(target, Stack) else 1
            if target is None or not (isinstance(target, Stack) or self.served.takes_copies):
                tensor = tensor.clone()
                self._note(name, tensor, target, count)
                yield name, tensor
                continue
            trusted = self.expected is not None and _held_as_sent(target, tensor)
            if trusted:
                self.arrived[name] = Arrival(target, count, True)
            else:
                self._note(name, tensor, target, count)
            places = self._copy(tensor, target)
            if self.arrived[name].target is target:
                self.arrived[name] = self.arrived[name]._replace(places=places)
        self.current = "the end of the update"
        self._require_complete()

    def explain(self, error: Exception) -> str:
        """What to tell the sender about an exception raised while loading."""
        what = str(error) if isinstance(error, SwapqError) else f"{type(error).__name__}: {error}"
        return f"the update failed: {what} (at {self.current}, after {self.tensors} tensors)"

    def compare_held(self) -> tuple[int, tuple[str, ...]]:
        """Read every tensor back from the engine, compare it with what arrived, and that with what the sender has.

        Returns:
            How many tensors were compared, and the names of those that cannot be read back.

        Raises:
            SyncError: bytes changed on the way, or the engine holds something else than what arrived.
        """
        held, keys, unreadable = Digests(), dict[str, list[str]](), list[str]()

        def read() -> Iterator[tuple[str, Tensor]]:
            layouts = Layouts()
            for name, arrival in self.arrived.items():
                parts = self._held(arrival, layouts)
                if any(part is None for part in parts):
                    unreadable.append(name)
                    continue
                keys[name] = [_key(name, i) for i in range(len(parts))]
                yield from zip(keys[name], parts, strict=True)

        held.add_all(read())
        arrived, holds = self._digests.result(), held.result()
        self._compare_with_sender(arrived, holds)
        trusted = {name for name, arrival in self.arrived.items() if arrival.trusted}
        wrong = sorted(n for n, ks in keys.items() if n not in trusted and any(holds[k] != arrived[k] for k in ks))
        if wrong:
            raise SyncError(
                f"the engine does not hold what arrived: {_listed(wrong)}; a loader changed the bytes: sync again or restart "
                "the engine"
            )
        return sum(self.arrived[name].tensors for name, places in keys.items() if places), tuple(unreadable)

    def _expected_target(self, name: str, tensor: Tensor) -> Stack | Placement | None:
        target: Stack | Placement | None = self.served.stacks.get(name) or self.served.placements.get(name)
        stack = self.served.stack_of.get(name)
        if name in self.arrived or name in self._split or stack in self.arrived:
            raise SyncError(f"{name}: arrived twice in one update; send every tensor once, of a stack or by itself")
        if target is None:
            if name in self.served.tied:
                return None
            near = difflib.get_close_matches(name, [*self.served.placements, *self.served.stacks], n=1, cutoff=0.8)
            hint = f"; the nearest name is {near[0]}" if near else ""
            raise SyncError(f"{name}: the engine's checkpoint has no tensor of that name{hint}; send checkpoint names")
        _require_like(name, tensor, target.meta, exact=isinstance(target, Stack))
        if stack is not None:
            self._split.add(stack)
        return target

    def _require_one_way(self, name: str, target: Stack | Placement | None) -> None:
        """Refuse a layer of experts of which a part is copied and a part goes through vLLM's reload, which would take the layer apart."""
        if target is None or self.served.takes_copies:
            return
        stacked = isinstance(target, Stack)
        layers = [target.layer] if isinstance(target, Stack) else [piece.layer for piece in target.pieces]
        if any(self._ways.setdefault(id(layer), stacked) != stacked for layer in layers):
            raise SyncError(
                f"{name}: this engine takes a layer's experts as stacks or one by one, not a part of them each way; send all stacks "
                "of the layer, or none"
            )

    def _note(self, name: str, tensor: Tensor, target: Stack | Placement | None, tensors: int) -> None:
        """Remember what arrived by its digest; a copy of a tied tensor must equal what the engine holds of the other."""
        if name in self.served.tied and not (isinstance(target, Placement) and target.pieces):
            target = self.served.placements.get(self.served.tied[name])
        self.arrived[name] = Arrival(target, tensors, False)
        self._digest_arrival(name, tensor, target)

    def _copy(self, tensor: Tensor, target: Stack | Placement) -> list[Tensor]:
        """Copy into the live tensors; gives the regions that were written."""
        if isinstance(target, Stack):
            self.copied[id(target.layer)] = target.layer
            live = self.served.live[target.layer, target.parameter]
            places, parts = target.shard.held(live), target.shard.of(tensor)
        else:
            self.copied.update((id(piece.layer), piece.layer) for piece in target.pieces)
            places = [piece.live.view(self.served.live[piece.layer, piece.name]) for piece in target.pieces]
            parts = [piece.source.view(tensor) for piece in target.pieces]  # type: ignore[union-attr]
        for place, part in zip(places, parts, strict=True):
            place.copy_(part)
        return places

    def _digest_arrival(self, name: str, tensor: Tensor, target: Stack | Placement | None) -> None:
        """Digest what arrived, and each part of it that must be found in the engine."""
        self._digests.add(name, tensor)
        if isinstance(target, Stack):
            for i, part in enumerate(target.shard.of(tensor)):
                self._digests.add(_key(name, i), part)
        elif target is not None:
            for i, piece in enumerate(target.pieces):
                part = piece.of(tensor)
                self._digests.add(_key(name, i), part.reshape(tensor.shape) if target.whole else part)

    def _held(self, arrival: Arrival, layouts: Layouts) -> list[Tensor | None]:
        """What the engine holds in each place of a tensor that arrived; None where it cannot be read back."""
        target, held = arrival.target, list[Tensor | None]()
        if arrival.places is not None:
            held += arrival.places
        elif isinstance(target, Stack):
            held += target.shard.held(self.served.live[target.layer, target.parameter])
        elif target is not None:
            held += [piece.held(layouts) for piece in target.pieces]
        if isinstance(target, Placement) and target.whole:
            return [None if part is None else part.reshape(target.meta.shape) for part in held]
        return held

    def _compare_with_sender(self, arrived: Mapping[str, str], holds: Mapping[str, str]) -> None:
        for name, arrival in self.arrived.items() if self.expected is not None else ():
            found = holds[_key(name, 0)] if arrival.trusted else arrived[name]
            sent = self.expected[name]  # type: ignore[index]
            if found != sent:
                where = "is held" if arrival.trusted else "arrived"
                raise SyncError(
                    f"{name}: {where} with digest {found}, but the sender has {sent}; bytes changed on the way"
                )

    def _require_complete(self) -> None:
        arrived = self.arrived.keys()
        if not (self.served.required_unstacked <= arrived and self.served.stacks.keys() <= arrived):
            stack_of = self.served.stack_of
            missing = [
                name for name in self.served.required if name not in arrived and stack_of.get(name) not in arrived
            ]
        else:
            missing = []
        if missing:
            raise SyncError(
                f"the update is incomplete, {len(missing)} tensors did not arrive: {_listed(self._as_sent(missing))}; send every tensor "
                "every time"
            )
        if self.expected is None:
            return
        unsent = sorted(set(self.expected) - set(self.arrived))
        unknown = sorted(set(self.arrived) - set(self.expected))
        if unsent:
            raise SyncError(f"the sender has digests of {len(unsent)} tensors that did not arrive: {_listed(unsent)}")
        if unknown:
            raise SyncError(f"the sender has no digest of {len(unknown)} tensors that arrived: {_listed(unknown)}")

    def _as_sent(self, missing: list[str]) -> list[str]:
        """``missing`` with the stacks that a sender of stacks has left out under their own names."""
        if not any(isinstance(arrival.target, Stack) for arrival in self.arrived.values()):
            return missing
        gone = set(missing)
        stacks = [stack for stack in self.served.stacks.values() if gone.issuperset(stack.covers)]
        inside = {name for stack in stacks for name in stack.covers}
        return [stack.name for stack in stacks] + [name for name in missing if name not in inside]


def _require_like(name: str, tensor: Tensor, meta: Meta, *, exact: bool) -> None:
    alike = tensor.dtype == meta.dtype or (
        not exact and tensor.dtype in _FLOATS and meta.dtype in _FLOATS and not is_scale(name)
    )
    if not alike:
        raise SyncError(
            f"{name}: arrived as {tensor.dtype}, but the engine holds {meta.dtype}; send it in the checkpoint's dtype"
        )
    if tuple(tensor.shape) != meta.shape:
        raise SyncError(
            f"{name}: arrived with shape {tuple(tensor.shape)}, but the checkpoint has {meta.shape}; send the whole tensor"
        )


def _held_as_sent(target: Stack | Placement, tensor: Tensor) -> bool:
    """Whether the engine will hold the tensor's own bytes, whole and in one place, so that one digest tells all."""
    if isinstance(target, Stack):
        return target.whole
    piece: Piece | None = target.pieces[0] if len(target.pieces) == 1 else None
    return piece is not None and target.whole and getattr(piece.layer, piece.name).dtype == tensor.dtype


def _key(name: str, place: int) -> str:
    return f"{name} #{place}"


def _listed(names: list[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
