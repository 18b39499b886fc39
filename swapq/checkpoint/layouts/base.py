"""What a layout decides: how the parts of one quantized weight are named and stored, and what the configs say. Never which or how."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from swapq import formats
from swapq.errors import UnsupportedError
from swapq.formats import Parts
from swapq.kernels.cpu import Empty
from swapq.natural import natural_key
from swapq.plan import Plan

__all__ = ["Layout", "Stored"]


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as a file holds it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Layout(ABC):
    """Names and storage of quantized weights in one kind of checkpoint."""

    name: ClassVar[str]
    #: formats that the layout can hold
    formats: ClassVar[frozenset[str]]
    #: whether its config can say that no weight is quantized
    holds_none: ClassVar[bool] = False

    @abstractmethod
    def stored(self, weight: str, fmt: str, matrix: tuple[int, int]) -> list[Stored]:
        """Every tensor that the ``[N, K]`` weight called ``weight`` (``....weight``) becomes, the codes first."""

    @abstractmethod
    def encode(self, weight: str, fmt: str, parts: Parts, empty: Empty | None = None) -> dict[str, Tensor]:
        """The tensors of :meth:`stored` by name, from codes and scales. ``empty`` gives the memory of codes that are packed."""

    @abstractmethod
    def decode(self, weight: str, fmt: str, tensors: Mapping[str, Tensor]) -> Parts:
        """Codes and scales from the tensors of :meth:`stored`."""

    @abstractmethod
    def quantization_config(self, plan: Plan) -> dict[str, Any]:
        """``config.json: quantization_config``."""

    @abstractmethod
    def quantized(self, described: Mapping[str, Any], scaled: Sequence[str]) -> dict[str, str]:
        """Weight -> format of what a ``quantization_config`` of this layout covers, whoever wrote it.

        Args:
            described: the ``quantization_config``.
            scaled: modules that have block scales in the files, which tell what a config means that lists nothing by name.

        Raises:
            CheckpointError: the config contradicts itself, or says nothing of a module that is stored quantized.
            UnsupportedError: an algorithm that swapq does not read.
        """

    def contradictions(self, described: Mapping[str, Any], folder: Path) -> list[str]:
        """What further files of ``folder`` say against ``described``, one sentence each."""
        return []

    def require(self, plan: Plan) -> None:
        """Refuse a plan with a format that the layout cannot hold, or, in layouts of other tools, without a quantized weight.

        Raises:
            UnsupportedError: naming the format and what the layout holds.
        """
        if not plan.quantized and not self.holds_none:
            raise UnsupportedError(
                f"layout {self.name!r} has no words for recipe {plan.recipe.name!r}, which quantizes nothing; its readers load the BF16 "
                "source itself, or choose layout 'swapq'"
            )
        for fmt in sorted(set(plan.quantized.values()) - self.formats):
            raise UnsupportedError(
                f"layout {self.name!r} cannot hold {fmt}; it holds {', '.join(sorted(self.formats))}"
            )

    def extra_files(self, plan: Plan) -> dict[str, dict[str, Any]]:
        """Further JSON files, by name, that readers of this layout want."""
        return {}


def stem(weight: str) -> str:
    """``weight`` without its last dotted part."""
    return weight.rpartition(".")[0]


def kept_modules(plan: Plan) -> list[str]:
    """Names of every module whose weight stays unquantized and that a reader could take for a quantized linear: exact, no patterns, in
    natural order, so that a live model and its folder give one list.

    Routers, heads and embeddings included. Experts that stay are named as a module and one by one, since readers ask either way.
    """
    quantized = {stem(name) for name in plan.quantized}
    names: dict[str, None] = {}
    for entry, info in zip(plan.entries, plan.anatomy.tensors, strict=True):
        if entry.quantized or entry.format == "dropped" or len(entry.shape) < 2:
            continue
        layout = plan.anatomy.layout_of(info)
        if info.expert is not None and layout is not None:
            names[layout.hub_prefix] = None
            held = plan.anatomy.hub_weights(info)
        else:
            held = (plan.anatomy.hub_name(entry.name),)
        for name in held:
            module = name.removesuffix(".weight")
            if module not in quantized:
                names[module] = None
    return sorted(names, key=natural_key)


def part_shapes(fmt: str, matrix: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parts of one weight in its format's default scope."""
    form = formats.get(fmt)
    return form.part_shapes(matrix, scope=form.default_scope)
