"""Plan: a recipe resolved against one model, one line per tensor with its format and the reason. Nobody else decides a format.

A plan is made from names and shapes alone, and everything that can be refused is refused here, before anything is touched.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from swapq import anatomy as anatomies
from swapq import formats
from swapq.anatomy import Anatomy, Role, TensorInfo
from swapq.errors import PlanError
from swapq.natural import natural_key
from swapq.plan_rules import Decision, Verdict, decide
from swapq.recipe import Recipe

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Plan", "PlanEntry", "plan"]


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One source tensor and what becomes of it.

    Attributes:
        name: as the source spells it.
        role: what the tensor is.
        format: ``bf16`` where it stays as it is (whatever its dtype), ``dropped`` for scales of a block-FP8 source, else the format.
        reason: why.
        shape: source shape.
        dtype: source dtype.
        bytes_before: stored bytes in the source.
        bytes_after: stored bytes of what it becomes, scales included.
        tensors: Hub names of the quantized weights it yields; empty when kept.
    """

    name: str
    role: Role
    format: str
    reason: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes_before: int
    bytes_after: int
    tensors: tuple[str, ...]

    @property
    def quantized(self) -> bool:
        """Whether a format applies."""
        return bool(self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "role": self.role.value,
            "format": self.format,
            "reason": self.reason,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "tensors": list(self.tensors),
        }


class Plan:
    """What a recipe does to one model. Iterate over it for the entries, print it for a table.

    Attributes:
        recipe: the recipe.
        anatomy: the model's anatomy.
        tp: tensor-parallel size that lengths were checked for.
        ep: expert-parallel size that lengths were checked for.
        entries: one entry per source tensor, in source order.
    """

    def __init__(self, recipe: Recipe, anatomy: Anatomy, verdict: Verdict, *, tp: int = 1, ep: int = 1) -> None:
        self.recipe = recipe
        self.anatomy = anatomy
        self.tp = tp
        self.ep = ep
        self.entries = tuple(
            _entry(info, d, anatomy) for info, d in zip(anatomy.tensors, verdict.decisions, strict=True)
        )
        self._verdict = verdict

    def __copy__(self) -> "Plan":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Plan":
        return self  # nothing in a plan changes, and a converted model that is copied carries the same plan

    def __iter__(self) -> Iterator[PlanEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @cached_property
    def quantized(self) -> Mapping[str, str]:
        """Hub name -> format of every quantized weight, layers and experts in numeric order, the same from a live model and its files."""
        pairs = [(name, entry.format) for entry in self.entries for name in entry.tensors]
        return dict(sorted(pairs, key=lambda pair: natural_key(pair[0])))

    @cached_property
    def _by_name(self) -> dict[str, PlanEntry]:
        return {entry.name: entry for entry in self.entries}

    def entry_of(self, name: str) -> PlanEntry:
        """Entry of a source tensor.

        Raises:
            PlanError: the source has no such tensor.
        """
        if name not in self._by_name:
            raise PlanError(f"the plan has no source tensor {name!r}")
        return self._by_name[name]

    def format_of(self, name: str) -> str:
        """Format of a source tensor.

        Raises:
            PlanError: the source has no such tensor.
        """
        return self.entry_of(name).format

    @property
    def warnings(self) -> tuple[str, ...]:
        """What will not stop a conversion and still deserves a look."""
        return tuple(self._verdict.warnings)

    def summary(self) -> dict[str, Any]:
        """Totals as plain JSON values: counts, bytes, bits per parameter, a split by role and format, exceptions, warnings."""
        before, after = sum(e.bytes_before for e in self), sum(e.bytes_after for e in self)
        parameters = sum(math.prod(e.shape) for e in self if e.format != "dropped")
        split: dict[str, dict[str, dict[str, int]]] = {}
        exceptions: dict[tuple[str, str], int] = {}
        for entry in self:
            row = split.setdefault(entry.role.value, {}).setdefault(
                entry.format, dict.fromkeys(("tensors", "parameters", "bytes_before", "bytes_after"), 0)
            )
            row["tensors"] += 1
            row["parameters"] += 0 if entry.format == "dropped" else math.prod(entry.shape)
            row["bytes_before"] += entry.bytes_before
            row["bytes_after"] += entry.bytes_after
            if entry.format == "bf16" and self.recipe.format_of(entry.role) != "bf16":
                key = (entry.role.value, entry.reason)
                exceptions[key] = exceptions.get(key, 0) + 1
        return {
            "family": self.anatomy.family,
            "recipe": self.recipe.name,
            "recipe_id": self.recipe.id,
            "policies": self.recipe.policies,
            "matched": self.recipe.matched,
            "tp": self.tp,
            "ep": self.ep,
            "layers": self.anatomy.num_layers,
            "first_layers_bf16": self._verdict.first,
            "last_layers_bf16": self._verdict.last,
            "tensors": len(self),
            "quantized": sum(e.quantized for e in self),
            "kept": sum(e.format == "bf16" for e in self),
            "dropped": sum(e.format == "dropped" for e in self),
            "quantized_weights": len(self.quantized),
            "parameters": parameters,
            "bytes_before": before,
            "bytes_after": after,
            "bits_per_parameter": 8 * after / parameters if parameters else 0.0,
            "roles": split,
            "exceptions": [{"role": role, "reason": reason, "tensors": n} for (role, reason), n in exceptions.items()],
            "patterns": self._verdict.patterns,
            "warnings": list(self.warnings),
        }

    def to_dict(self) -> dict[str, Any]:
        """Recipe, totals and every entry as plain JSON values."""
        return {"recipe": self.recipe.to_dict(), "summary": self.summary(), "entries": [e.to_dict() for e in self]}

    def __rich__(self) -> "RenderableType":
        from swapq.plan_table import table

        return table(self)

    def __str__(self) -> str:
        from swapq.plan_table import text

        return text(self)

    def __repr__(self) -> str:
        return f"Plan({self.recipe.name!r}, {self.anatomy.family}, {len(self)} tensors, {sum(e.quantized for e in self)} quantized)"


def plan(
    model_or_directory: nn.Module | str | os.PathLike[str] | Anatomy,
    recipe: str | Recipe | Mapping[str, Any] | os.PathLike[str],
    *,
    tp: int = 1,
    ep: int = 1,
) -> Plan:
    """Resolve a recipe against a live model or a checkpoint folder; reads names and shapes, writes nothing.

    Args:
        model_or_directory: a model, a checkpoint folder, or an anatomy made before.
        recipe: a recipe, its name, its fields, or a ``.json`` file of them.
        tp: tensor-parallel size of the engine: contraction lengths are checked after the cut.
        ep: expert-parallel size; above 1, experts are whole on their rank and ``tp`` does not cut them.

    Raises:
        RecipeError: no recipe, or one that is refused.
        AnatomyError: an unknown family, or a model that disagrees with its config.
        CheckpointError: a folder that is damaged, incomplete or unsafe.
        PlanError: a pattern without a match or inside a fused group, a length that the block does not divide (also after ``tp`` and
            ``expert_tp``), too many kept layers, nothing left to quantize, or a source that is quantized already.
    """
    resolved = Recipe.resolve(recipe)
    if isinstance(model_or_directory, Anatomy):
        found = model_or_directory
    elif isinstance(model_or_directory, nn.Module):
        found = anatomies.of_model(model_or_directory)
    elif isinstance(model_or_directory, str | os.PathLike):
        found = anatomies.of_checkpoint(Path(model_or_directory))
    else:
        raise PlanError(f"a plan is made of a model or a checkpoint folder; got {type(model_or_directory).__name__}")
    return Plan(resolved, found, decide(found, resolved, tp=tp, ep=ep), tp=tp, ep=ep)


def _entry(info: TensorInfo, decision: Decision, anatomy: Anatomy) -> PlanEntry:
    numel = math.prod(info.shape)
    before = numel * info.dtype.itemsize
    tensors: tuple[str, ...] = ()
    if decision.format == "dropped":
        after = 0
    elif decision.format == "bf16":
        after = 2 * numel if info.dtype == torch.float8_e4m3fn else before
    else:
        tensors = anatomy.hub_weights(info)
        after = sum(_stored_bytes(decision.format, _matrix(info, anatomy)) for _ in tensors)
    return PlanEntry(
        info.name, info.role, decision.format, decision.reason, info.shape, info.dtype, before, after, tensors
    )


def _matrix(info: TensorInfo, anatomy: Anatomy) -> tuple[int, int]:
    layout = anatomy.layout_of(info)
    if layout is None or info.expert is None:
        return info.shape[0], info.shape[1]
    return layout.matrix("down" if info.expert.projection == "down" else "up")


@lru_cache(maxsize=1024)
def _stored_bytes(name: str, matrix: tuple[int, int]) -> int:
    """Bytes of the stored parts of one quantized ``[N, K]`` weight."""
    fmt = formats.get(name)
    shapes = fmt.part_shapes(matrix, scope=fmt.default_scope)
    return sum(math.prod(shape) * fmt.dtypes[part].itemsize for part, shape in shapes.items())
