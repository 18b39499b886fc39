"""Routing: which token rows go to which expert, sorted by expert, and the way back."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Routing"]


@dataclass(frozen=True)
class Routing:
    """Routed slots sorted by expert (stable: a group keeps token order).

    Attributes:
        slots: int64 ``[R]``, flat position ``token * top_k + j`` of each routed slot. Slots of experts that are not here are absent.
        counts: rows of each expert.
        num_tokens, top_k: shape of the routing tables.
    """

    slots: Tensor
    counts: tuple[int, ...]
    num_tokens: int
    top_k: int

    @classmethod
    def of(cls, top_k_index: Tensor, num_experts: int) -> "Routing":
        """Sort ``top_k_index [T, k]``. Ids below 0 or from ``num_experts`` on belong to another rank and are left out."""
        flat = top_k_index.reshape(-1).to(torch.int64)
        flat = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
        counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts].tolist()
        order = torch.argsort(flat, stable=True)[: sum(counts)]
        return cls(order, tuple(counts), *top_k_index.shape)

    @classmethod
    def single(cls, rows: int, device: torch.device) -> "Routing":
        """One expert that takes every row in place: a plain linear."""
        return cls(torch.arange(rows, device=device), (rows,), rows, 1)

    @property
    def num_experts(self) -> int:
        return len(self.counts)

    @property
    def tokens(self) -> Tensor:
        """Token row of each routed slot, int64 ``[R]``."""
        return self.slots // self.top_k

    @cached_property
    def ends(self) -> Tensor:
        """Row at which each expert's group ends, int32 ``[E]``."""
        counts = torch.tensor(self.counts, dtype=torch.int32, device="cpu")
        return counts.cumsum(0, dtype=torch.int32).to(self.slots.device)

    @cached_property
    def positions(self) -> Tensor:
        """Row of each slot in routed order, int32 ``[T * k]``; -1 where its expert is not here."""
        rows = torch.full((self.num_tokens * self.top_k,), -1, dtype=torch.int32, device=self.slots.device)
        rows[self.slots] = torch.arange(self.slots.numel(), dtype=torch.int32, device=self.slots.device)
        return rows

    def groups(self) -> Iterator[tuple[int, slice]]:
        """``(expert, its rows)`` for every expert that has rows."""
        start = 0
        for expert, count in enumerate(self.counts):
            if count:
                yield expert, slice(start, start + count)
            start += count

    def padded_counts(self, multiple: int) -> tuple[int, ...]:
        """Rows of each expert, padded to a multiple."""
        return tuple(-(-count // multiple) * multiple for count in self.counts)

    def padded(self, multiple: int) -> tuple["Routing", Tensor]:
        """The same groups, each padded to a multiple of rows, and the row in the padded order of each of our rows."""
        sizes, device = self.padded_counts(multiple), self.slots.device
        counts, wide = (torch.tensor(c, dtype=torch.int64, device="cpu") for c in (self.counts, sizes))
        shift = ((wide - counts).cumsum(0) - (wide - counts)).to(device)
        rows = sum(self.counts)
        position = shift.repeat_interleave(counts.to(device), output_size=rows) + torch.arange(rows, device=device)
        return Routing(self.slots.new_empty(0), sizes, self.num_tokens, self.top_k), position

    def pieces(self, length: int) -> Tensor:
        """Where groups are cut into pieces of ``length`` rows, the last one of a group maybe shorter: int32 ``[2, pieces]``, the first row
        of each and the row at which its group ends. They are the blocks of the padded order."""
        if length not in self._pieces:
            counts = torch.tensor(self.counts, dtype=torch.int64, device="cpu")
            ends, pieces = counts.cumsum(0), -(-counts // length)
            inside = torch.arange(int(pieces.sum()), device="cpu") - (pieces.cumsum(0) - pieces).repeat_interleave(
                pieces
            )
            table = torch.stack(
                [(ends - counts).repeat_interleave(pieces) + inside * length, ends.repeat_interleave(pieces)]
            )
            self._pieces[length] = table.to(torch.int32).to(self.slots.device)
        return self._pieces[length]

    @cached_property
    def _pieces(self) -> dict[int, Tensor]:
        return {}

    def pad_rows(self, rows: Tensor, multiple: int) -> tuple["Routing", Tensor]:
        """``rows [R, N]`` in zero-padded groups: what blocks along the rows need (contract section 5)."""
        padded, position = self.padded(multiple)
        out = rows.new_zeros(sum(padded.counts), rows.shape[1])
        out[position] = rows
        return padded, out

    def gather(self, per_token: Tensor) -> Tensor:
        """Row ``[R, ...]`` of each slot from ``[T, ...]``."""
        return per_token.index_select(0, self.tokens)

    def scatter(self, rows: Tensor) -> Tensor:
        """``[R, N] -> [T, k, N]``, zeros where a slot's expert is not here. Differentiable."""
        out = rows.new_zeros(self.num_tokens * self.top_k, rows.shape[-1])
        return out.index_copy(0, self.slots, rows).view(self.num_tokens, self.top_k, rows.shape[-1])
