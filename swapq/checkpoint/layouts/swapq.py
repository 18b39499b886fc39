"""Layout ``swapq``: ModelOpt's tensor names, E8M0 as uint8, the recipe and the exact list of quantized weights in the config."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from swapq import formats
from swapq.checkpoint.layouts.base import Layout, Stored, part_shapes, stem
from swapq.errors import CheckpointError
from swapq.formats import Parts
from swapq.kernels import cpu
from swapq.kernels.cpu import Empty
from swapq.plan import Plan

__all__ = ["SwapqLayout", "describe"]


class SwapqLayout(Layout):
    """``....weight`` (codes), ``....weight_scale`` (block scales; FP8 block: ``....weight_scale_inv``), ``....weight_scale_2`` (NVFP4's
    FP32 scale, a scalar). INT4 codes are packed, two a byte."""

    name = "swapq"
    formats: ClassVar[frozenset[str]] = frozenset(formats.names())
    holds_none = True

    def stored(self, weight: str, fmt: str, matrix: tuple[int, int]) -> list[Stored]:
        form, shapes = formats.get(fmt), part_shapes(fmt, matrix)
        return [Stored(_name(weight, fmt, part), form.dtypes[part], shapes[part]) for part in form.suffixes]

    def encode(self, weight: str, fmt: str, parts: Parts, empty: Empty | None = None) -> dict[str, Tensor]:
        stored = cpu.stored(parts, fmt, empty)
        return {_name(weight, fmt, part): t for part, t in stored._asdict().items() if t is not None}

    def decode(self, weight: str, fmt: str, tensors: Mapping[str, Tensor]) -> Parts:
        form = formats.get(fmt)
        return form.loaded(Parts(*(tensors[_name(weight, fmt, part)] for part in form.suffixes)))

    def quantization_config(self, plan: Plan) -> dict[str, Any]:
        listed: dict[str, list[str]] = {}
        for name, fmt in plan.quantized.items():
            listed.setdefault(fmt, []).append(name)
        return describe(plan, listed)

    def quantized(self, described: Mapping[str, Any], scaled: Sequence[str]) -> dict[str, str]:
        groups = described.get("quantized")
        if not isinstance(groups, dict) or not all(isinstance(v, list) for v in groups.values()):
            raise CheckpointError(
                "config.json: quantization_config has no `quantized`, the list of quantized weights by format"
            )
        found: dict[str, str] = {}
        for fmt, names in groups.items():
            for name in names:
                if name in found:
                    raise CheckpointError(f"config.json: {name} is listed as {found[name]} and as {fmt}")
                found[name] = fmt
        return found


def describe(plan: Plan, quantized: Mapping[str, list[str]]) -> dict[str, Any]:
    """The ``quantization_config`` of this layout."""
    return {
        "quant_method": "swapq",
        "version": 1,
        "layout": "swapq",
        "recipe": plan.recipe.to_dict(),
        "quantized": dict(quantized),
    }


def _name(weight: str, fmt: str, part: str) -> str:
    return f"{stem(weight)}.{formats.get(fmt).suffixes[part]}"
