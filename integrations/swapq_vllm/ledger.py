"""The books of one update: what should arrive, what did, and whether the engine holds it."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from swapq.digest import tensor_digest
from swapq.errors import SwapqError, SyncError
from swapq.formats import is_scale
from swapq_vllm.placement import Layouts, Placement
from swapq_vllm.served import Served

__all__ = ["Ledger"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Arrival(NamedTuple):
    """Digest of a tensor that arrived, and of each part that must be found in the engine (None: not readable)."""

    digest: str
    parts: list[str]


class Ledger:
    """Checks an update while it streams by, and what the engine holds afterwards."""

    def __init__(self, served: Served, expected: Mapping[str, str] | None) -> None:
        self.served, self.expected = served, expected
        self.arrived: dict[str, Arrival] = {}
        self.bytes = 0
        self.current = "the first tensor"

    def stream(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """``tensors``, each checked and copied (the sender may reuse its buffer); at the end, whether all arrived."""
        for name, tensor in tensors:
            self.current = name
            placement = self._expected_placement(name, tensor)
            tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
            self.bytes += tensor.numel() * tensor.element_size()
            self.arrived[name] = self._arrival(tensor, placement)
            self._compare_with_sender(name)
            yield name, tensor
        self.current = "the end of the update"
        self._require_complete()

    def explain(self, error: Exception) -> str:
        """What to tell the sender about an exception raised while loading."""
        what = str(error) if isinstance(error, SwapqError) else f"{type(error).__name__}: {error}"
        return f"the update failed: {what} (at {self.current}, after {len(self.arrived)} tensors)"

    def compare_held(self) -> tuple[int, tuple[str, ...]]:
        """Read every tensor back from the engine and compare.

        Returns:
            How many tensors were compared, and the names of those that cannot be read back.

        Raises:
            SyncError: the engine holds something else than what arrived.
        """
        layouts, unreadable, wrong, compared = Layouts(), [], [], 0
        for name, placement in self.served.placements.items():
            pieces = placement.pieces
            held = [piece.held(layouts) for piece in pieces]
            if any(part is None for part in held):
                unreadable.append(name)
                continue
            have = [
                _part_digest(part.reshape(placement.meta.shape) if placement.whole else part)
                for part in held
                if part is not None
            ]
            if pieces and have != self.arrived[name].parts:
                wrong.append(name)
            compared += bool(pieces)
        if wrong:
            raise SyncError(
                f"the engine does not hold what arrived: {_listed(wrong)}; a loader changed the bytes: sync again or restart the engine"
            )
        return compared, tuple(unreadable)

    def _expected_placement(self, name: str, tensor: Tensor) -> Placement | None:
        if name in self.arrived:
            raise SyncError(f"{name}: arrived twice in one update; send every tensor once")
        placement = self.served.placements.get(name)
        if placement is None:
            if name in self.served.tied:
                return None
            near = difflib.get_close_matches(name, self.served.placements, n=1, cutoff=0.8)
            hint = f"; the nearest name is {near[0]}" if near else ""
            raise SyncError(f"{name}: the engine's checkpoint has no tensor of that name{hint}; send checkpoint names")
        meta = placement.meta
        alike = tensor.dtype == meta.dtype or (tensor.dtype in _FLOATS and meta.dtype in _FLOATS and not is_scale(name))
        if not alike:
            raise SyncError(
                f"{name}: arrived as {tensor.dtype}, but the engine holds {meta.dtype}; send it in the checkpoint's dtype"
            )
        if tuple(tensor.shape) != meta.shape:
            raise SyncError(
                f"{name}: arrived with shape {tuple(tensor.shape)}, but the checkpoint has {meta.shape}; send the whole tensor"
            )
        return placement

    def _arrival(self, tensor: Tensor, placement: Placement | None) -> Arrival:
        whole = tensor_digest(tensor)
        if placement is None:
            return Arrival(whole, [])
        parts = []
        for piece in placement.pieces:
            part = piece.of(tensor)
            if placement.whole:
                as_is = part.dtype == tensor.dtype and not piece.loses_sign_of_zero
                parts.append(whole if as_is else _part_digest(part.reshape(tensor.shape)))
            else:
                parts.append(_part_digest(part))
        return Arrival(whole, parts)

    def _compare_with_sender(self, name: str) -> None:
        sent = None if self.expected is None else self.expected.get(name)
        if sent is not None and sent != self.arrived[name].digest:
            raise SyncError(
                f"{name}: arrived with digest {self.arrived[name].digest}, but the sender has {sent}; bytes changed on the way"
            )

    def _require_complete(self) -> None:
        missing = [n for n, p in self.served.placements.items() if n not in self.arrived and p.pieces]
        if missing:
            raise SyncError(
                f"the update is incomplete, {len(missing)} tensors did not arrive: {_listed(missing)}; send every tensor every time"
            )
        if self.expected is not None:
            for name in self.arrived:
                self._compare_with_sender(name)
            unsent = sorted(set(self.expected) - set(self.arrived))
            unknown = sorted(set(self.arrived) - set(self.expected))
            if unsent:
                raise SyncError(
                    f"the sender has digests of {len(unsent)} tensors that did not arrive: {_listed(unsent)}"
                )
            if unknown:
                raise SyncError(f"the sender has no digest of {len(unknown)} tensors that arrived: {_listed(unknown)}")


def _part_digest(part: Tensor) -> str:
    return tensor_digest(part.contiguous())


def _listed(names: list[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
