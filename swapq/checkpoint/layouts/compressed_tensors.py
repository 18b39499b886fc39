"""Layout ``compressed-tensors``: ``nvfp4-pack-quantized`` and ``mxfp8-quantized``, as llm-compressor writes them and vLLM reads them.

NVFP4's global scale is stored inverted (2688 / amax, a divisor) with shape [1]; ``input_global_scale`` is the neutral 1.0, since the
recipe's scale of activations is one per token, computed online. A recipe of several formats is one config group each, whose targets are
exact module names: readers look at class names such as ``Linear`` before they unfuse a merged layer, so a group for "the rest" would
catch it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from swapq.checkpoint.layouts.base import Layout, Stored, kept_modules, part_shapes, stem
from swapq.errors import CheckpointError, UnsupportedError
from swapq.formats import Parts
from swapq.formats.nvfp4 import NVFP4
from swapq.plan import Plan

__all__ = ["CompressedTensorsLayout"]

_FORMATS = {"nvfp4": "nvfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}
_READ = {name: fmt for fmt, name in _FORMATS.items()}
#: ``format`` of a config whose groups have several
_MIXED = "mixed-precision"


class CompressedTensorsLayout(Layout):
    """NVFP4: ``weight_packed``, ``weight_scale``, ``weight_global_scale``, ``input_global_scale``; MXFP8: ``weight``, ``weight_scale``."""

    name = "compressed-tensors"
    formats: ClassVar[frozenset[str]] = frozenset({"mxfp8", "nvfp4"})

    def stored(self, weight: str, fmt: str, matrix: tuple[int, int]) -> list[Stored]:
        shapes, base = part_shapes(fmt, matrix), stem(weight)
        if fmt == "mxfp8":
            codes = Stored(weight, torch.float8_e4m3fn, shapes["codes"])
            return [codes, Stored(f"{base}.weight_scale", torch.uint8, shapes["scales"])]
        return [
            Stored(f"{base}.weight_packed", torch.uint8, shapes["codes"]),
            Stored(f"{base}.weight_scale", torch.float8_e4m3fn, shapes["scales"]),
            Stored(f"{base}.weight_global_scale", torch.float32, (1,)),
            Stored(f"{base}.input_global_scale", torch.float32, (1,)),
        ]

    def encode(self, weight: str, fmt: str, parts: Parts) -> dict[str, Tensor]:
        base = stem(weight)
        if parts.global_scale is None:
            return {weight: parts.codes, f"{base}.weight_scale": parts.scales}
        return {
            f"{base}.weight_packed": parts.codes,
            f"{base}.weight_scale": parts.scales,
            f"{base}.weight_global_scale": torch.div(torch.ones(1), parts.global_scale.reshape(1)),
            f"{base}.input_global_scale": torch.ones(1),
        }

    def decode(self, weight: str, fmt: str, tensors: Mapping[str, Tensor]) -> Parts:
        base = stem(weight)
        if fmt == "mxfp8":
            return Parts(tensors[weight], tensors[f"{base}.weight_scale"])
        inverse = tensors[f"{base}.weight_global_scale"].float().reshape(())
        decode = torch.div(torch.ones_like(inverse), inverse)
        return Parts(tensors[f"{base}.weight_packed"], tensors[f"{base}.weight_scale"], decode)

    def quantization_config(self, plan: Plan) -> dict[str, Any]:
        names: dict[str, list[str]] = {}
        for weight, fmt in plan.quantized.items():
            names.setdefault(fmt, []).append(stem(weight))
        if not names:
            return {}
        found = sorted(names)
        return {
            "quant_method": "compressed-tensors",
            "format": _FORMATS[found[0]] if len(found) == 1 else _MIXED,
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
    return {
        "targets": targets,
        "weights": _arguments(fmt, dynamic=False),
        "input_activations": _arguments(fmt, dynamic="local" if fmt == "nvfp4" else True),
        "output_activations": None,
        "format": _FORMATS[fmt],
    }


def _arguments(fmt: str, *, dynamic: "bool | str") -> dict[str, Any]:
    nvfp4 = fmt == "nvfp4"
    return {
        "num_bits": 4 if nvfp4 else 8,
        "type": "float",
        "strategy": "tensor_group" if nvfp4 else "group",
        "symmetric": True,
        "dynamic": dynamic,
        "group_size": NVFP4.block if nvfp4 else 32,
        "scale_dtype": "torch.float8_e4m3fn" if nvfp4 else "torch.uint8",
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
        kind = entry.get("format") or described.get("format")
        if kind not in _READ:
            raise UnsupportedError(
                f"config.json: compressed-tensors format is {kind!r}; swapq reads {', '.join(_READ)}"
            )
        found.append((_READ[kind], [str(target) for target in entry.get("targets", [])]))
    return found
