"""Layout ``compressed-tensors``: ``nvfp4-pack-quantized``, ``mxfp8-quantized``, ``float-quantized`` (FP8 block) and ``pack-quantized``
(INT4), as llm-compressor writes them and vLLM reads them.

NVFP4's global scale is stored inverted (2688 / amax, a divisor) with shape [1]; ``input_global_scale`` is the neutral 1.0, since the
recipe's scale of activations is one per token, computed online. A recipe of several formats is one config group each, whose targets are
exact module names: readers look at class names such as ``Linear`` before they unfuse a merged layer, so a group for "the rest" would
catch it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from swapq.checkpoint.layouts.base import Layout, Stored, kept_modules, stem
from swapq.checkpoint.layouts.schemes import SCHEMES, format_named
from swapq.errors import CheckpointError
from swapq.formats import Parts
from swapq.kernels.cpu import Empty
from swapq.plan import Plan

__all__ = ["CompressedTensorsLayout"]

#: ``format`` of a config whose groups have several
_MIXED = "mixed-precision"


class CompressedTensorsLayout(Layout):
    """Tensors and arguments of each format are in ``schemes``."""

    name = "compressed-tensors"
    formats: ClassVar[frozenset[str]] = frozenset(SCHEMES)

    def stored(self, weight: str, fmt: str, matrix: tuple[int, int]) -> list[Stored]:
        return [Stored(f"{stem(weight)}.{name}", *what) for name, what in SCHEMES[fmt].stored(matrix).items()]

    def encode(self, weight: str, fmt: str, parts: Parts, empty: Empty | None = None) -> dict[str, Tensor]:
        return {f"{stem(weight)}.{name}": tensor for name, tensor in SCHEMES[fmt].encode(parts, empty).items()}

    def decode(self, weight: str, fmt: str, tensors: Mapping[str, Tensor]) -> Parts:
        scheme, base = SCHEMES[fmt], stem(weight)
        names = {name: f"{base}.{name}" for name in scheme.stored((scheme.form.block, scheme.form.block))}
        return scheme.decode({name: tensors[full] for name, full in names.items() if full in tensors})

    def quantization_config(self, plan: Plan) -> dict[str, Any]:
        names: dict[str, list[str]] = {}
        for weight, fmt in plan.quantized.items():
            names.setdefault(fmt, []).append(stem(weight))
        found = sorted(names)
        return {
            "quant_method": "compressed-tensors",
            "format": SCHEMES[found[0]].name if len(found) == 1 else _MIXED,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "ignore": kept_modules(plan),
            "config_groups": {
                f"group_{i}": _group(fmt, ["Linear"] if len(found) == 1 else names[fmt]) for i, fmt in enumerate(found)
            },
        }

    def quantized(self, described: Mapping[str, Any], scaled: Sequence[str]) -> dict[str, str]:
        groups = _groups(described)
        found = {f"{module}.weight": _format_of(module, groups) for module in scaled}
        named = {f"{target}.weight": fmt for fmt, targets in groups for target in targets if _is_name(target)}
        return found | {weight: fmt for weight, fmt in named.items() if weight not in found}


def _group(fmt: str, targets: list[str]) -> dict[str, Any]:
    scheme = SCHEMES[fmt]
    return {
        "targets": targets,
        "weights": scheme.weights,
        "input_activations": scheme.activations,
        "output_activations": None,
        "format": scheme.name,
    }


def _is_name(target: str) -> bool:
    """Whether a target is a module's name: no pattern, and no class such as ``Linear``."""
    return "." in target and not target.startswith("re:")


def _format_of(module: str, groups: Sequence[tuple[str, list[str]]]) -> str:
    """Format of the group that targets the module's name, else of one whose pattern does, else of the one for linears."""
    if len(groups) == 1:
        return groups[0][0]
    for matches in (module.__eq__, lambda target: _matches(target, module), "Linear".__eq__):
        for fmt, targets in groups:
            if any(matches(target) for target in targets):
                return fmt
    raise CheckpointError(
        f"config.json: no config group targets {module}, which is stored quantized; the file and its config disagree"
    )


def _matches(target: str, module: str) -> bool:
    if not target.startswith("re:"):
        return False
    try:
        return re.match(target[3:], module) is not None
    except re.error as error:
        raise CheckpointError(f"config.json: target {target!r} is no pattern ({error})") from None


def _groups(described: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Format and targets of every config group of a compressed-tensors ``quantization_config``.

    Raises:
        UnsupportedError: a format that swapq does not read.
        CheckpointError: groups that are not what they should be.
    """
    given = described.get("config_groups") or {}
    entries: list[Any] = list(given.values()) if isinstance(given, dict) else [None]
    if not all(isinstance(entry, dict) and isinstance(entry.get("targets", []), list) for entry in entries):
        raise CheckpointError("config.json: config_groups is no object of groups with lists of targets")
    found = []
    for entry in entries or [{}]:
        fmt = format_named(entry.get("format") or described.get("format"), entry.get("weights") or {})
        found.append((fmt, [str(target) for target in entry.get("targets", [])]))
    return found
