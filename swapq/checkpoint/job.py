"""A conversion known to its last byte before the first is written: units, output shards, and the place of every tensor in them."""

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from swapq.checkpoint.layouts import Layout, Stored
from swapq.checkpoint.units import Unit, units_of
from swapq.headers import DTYPES, Folder
from swapq.plan import Plan

__all__ = ["CONVERSION_VERSION", "HASH_BUFFER", "Job", "Shard"]

#: changes when the bytes that a conversion writes change
CONVERSION_VERSION = 1
#: a finished shard is hashed in pieces of this size
HASH_BUFFER = 1 << 18
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file: its units in source order, and where each of their tensors goes."""

    file: str
    units: tuple[Unit, ...]
    header: bytes
    offsets: dict[str, int]
    nbytes: int


@dataclass(frozen=True)
class Job:
    """Everything about one conversion that does not depend on how many workers carry it out."""

    plan: Plan
    source: Folder
    layout: Layout
    shards: tuple[Shard, ...]
    max_shard_size: int

    @classmethod
    def of(cls, plan: Plan, source: Folder, layout: Layout, max_shard_size: int) -> "Job":
        """Lay the output out.

        Raises:
            UnsupportedError, CheckpointError: see :func:`swapq.checkpoint.units.units_of`.
        """
        groups = list(_split(units_of(plan, source, layout), max_shard_size))
        names = ["model.safetensors"]
        if len(groups) > 1:
            names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
        return cls(
            plan, source, layout, tuple(_shard(n, g) for n, g in zip(names, groups, strict=True)), max_shard_size
        )

    @property
    def source_bytes(self) -> int:
        """Bytes that will be read."""
        return sum(unit.source_bytes for shard in self.shards for unit in shard.units)

    @property
    def output_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.nbytes for shard in self.shards)

    def memory_bound(self, workers: int) -> int:
        """Bytes that the workers hold at most, beside the program itself: the largest unit each, or a buffer to hash from."""
        units = (unit.held_bytes for shard in self.shards for unit in shard.units)
        return workers * max(HASH_BUFFER, max(units, default=0))

    def source_mtime_ns(self) -> int:
        """Newest modification time of the source's shards, now."""
        return max((self.source.path / file).stat().st_mtime_ns for file in self.source.files)

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Tensor name -> file."""
        return {name: shard.file for shard in self.shards for name in shard.offsets}

    @cached_property
    def source_hashes(self) -> dict[str, str]:
        """Source file -> SHA-256 of what its header says (names, dtypes, shapes, places)."""
        by_file: dict[str, list[Any]] = {file: [] for file in self.source.files}
        for t in self.source.tensors.values():
            by_file[t.file].append([t.name, _NAMES[t.dtype], list(t.shape), t.start, t.end])
        return {file: hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest() for file, rows in by_file.items()}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides the output: source headers, recipe, layout, shard size, and the version of the conversion."""
        decided = {
            "version": CONVERSION_VERSION,
            "source": self.source_hashes,
            "recipe": self.plan.recipe.to_dict(),
            "layout": self.layout.name,
            "max_shard_size": self.max_shard_size,
        }
        return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()


def _split(units: Iterable[Unit], limit: int) -> Iterator[list[Unit]]:
    group: list[Unit] = []
    size = 0
    for unit in units:
        grows = sum(o.nbytes for o in unit.outputs)
        if group and size + grows > limit:
            yield group
            group, size = [], 0
        group.append(unit)
        size += grows
    yield group


def _shard(file: str, units: list[Unit]) -> Shard:
    """Wide elements first, so that every tensor is aligned to its element without holes."""
    tensors = sorted((o for unit in units for o in unit.outputs), key=lambda o: -o.dtype.itemsize)
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for t in tensors:
        table[t.name] = _entry(t, position)
        position += t.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text)) % 8)
    header = struct.pack("<Q", len(text)) + text
    offsets = {t.name: len(header) + table[t.name]["data_offsets"][0] for t in tensors}
    return Shard(file, tuple(units), header, offsets, len(header) + position)


def _entry(t: Stored, position: int) -> dict[str, Any]:
    return {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [position, position + t.nbytes]}
