"""Layout ``modelopt``: what stock vLLM, TensorRT-LLM and SGLang load as NVIDIA ModelOpt checkpoints (NVFP4, MXFP8, or both).

Tensors are those of layout ``swapq``, with an ``input_scale`` of 1.0 beside NVFP4 weights: the recipe's scale of activations is one
per token, computed online, and engines that want a static one get the neutral value. ``config.json`` and ``hf_quant_config.json`` agree.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from swapq._version import __version__
from swapq.checkpoint.layouts.base import Layout, Stored, kept_modules, stem
from swapq.checkpoint.layouts.swapq import SwapqLayout
from swapq.errors import CheckpointError, UnsupportedError
from swapq.formats import Parts
from swapq.headers import read_json
from swapq.kernels.cpu import Empty
from swapq.natural import natural_key
from swapq.plan import Plan

__all__ = ["ModelOptLayout"]

_ALGORITHMS = {"nvfp4": "NVFP4", "mxfp8": "MXFP8"}
#: algorithms that are read
_READ = {"NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4", "MXFP8": "mxfp8"}
_GROUP = {"nvfp4": 16, "mxfp8": 32}
_FILE = "hf_quant_config.json"
_PRODUCER = {"name": "swapq", "version": __version__}


class ModelOptLayout(Layout):
    """``weight``, ``weight_scale``, ``weight_scale_2`` (NVFP4: amax / 2688, a multiplier), ``input_scale`` (NVFP4: 1.0)."""

    name = "modelopt"
    formats: ClassVar[frozenset[str]] = frozenset({"mxfp8", "nvfp4"})
    _shared = SwapqLayout()

    def stored(self, weight: str, fmt: str, matrix: tuple[int, int]) -> list[Stored]:
        same = self._shared.stored(weight, fmt, matrix)
        return [*same, Stored(_input_scale(weight), torch.float32, ())] if fmt == "nvfp4" else same

    def encode(self, weight: str, fmt: str, parts: Parts, empty: Empty | None = None) -> dict[str, Tensor]:
        same = self._shared.encode(weight, fmt, parts, empty)
        return (
            same | {_input_scale(weight): torch.ones((), dtype=torch.float32, device="cpu")} if fmt == "nvfp4" else same
        )

    def decode(self, weight: str, fmt: str, tensors: Mapping[str, Tensor]) -> Parts:
        return self._shared.decode(weight, fmt, tensors)

    def quantization_config(self, plan: Plan) -> dict[str, Any]:
        return (
            {
                "quant_method": "modelopt",
                "quant_algo": _algorithm(plan),
                "kv_cache_scheme": None,
                "ignore": kept_modules(plan),
                "producer": _PRODUCER,
            }
            | _group_size(plan)
            | _layers(plan)
        )

    def quantized(self, described: Mapping[str, Any], scaled: Sequence[str]) -> dict[str, str]:
        layers = _quantized_layers(described)
        if not layers:
            fmt = _format(described.get("quant_algo"))
            return {f"{module}.weight": fmt for module in scaled}
        entries = {module: _entry_of(layers, module) for module in scaled}
        found = {f"{module}.weight": _format(layers[entry].get("quant_algo")) for module, entry in entries.items()}
        rest = layers.keys() - set(entries.values())
        return found | {f"{m}.weight": _format(layers[m].get("quant_algo")) for m in sorted(rest, key=natural_key)}

    def contradictions(self, described: Mapping[str, Any], folder: Path) -> list[str]:
        path = folder / _FILE
        said = read_json(path).get("quantization") if path.exists() else None
        if not isinstance(said, dict):
            return []
        found = []
        for key, other in (
            ("quant_algo", "quant_algo"),
            ("quantized_layers", "quantized_layers"),
            ("ignore", "exclude_modules"),
        ):
            here, there = described.get(key), said.get(other)
            if key in described and other in said and _plain(here) != _plain(there):
                found.append(
                    f"{_FILE}: its {other} and {key} of config.json differ, and readers believe either; convert it again"
                )
        return found

    def extra_files(self, plan: Plan) -> dict[str, dict[str, Any]]:
        quantization: dict[str, Any] = {
            "quant_algo": _algorithm(plan),
            "kv_cache_quant_algo": None,
            "exclude_modules": kept_modules(plan),
        }
        return {
            _FILE: {
                "producer": _PRODUCER,
                "quantization": quantization | _group_size(plan) | _layers(plan),
            }
        }


def _input_scale(weight: str) -> str:
    return f"{stem(weight)}.input_scale"


def _formats(plan: Plan) -> list[str]:
    return sorted(set(plan.quantized.values()))


def _algorithm(plan: Plan) -> str:
    found = _formats(plan)
    return "MIXED_PRECISION" if len(found) > 1 else _ALGORITHMS[found[0]]


def _group_size(plan: Plan) -> dict[str, int]:
    found = _formats(plan)
    return {"group_size": _GROUP[found[0]]} if len(found) == 1 else {}


def _layers(plan: Plan) -> dict[str, Any]:
    if len(_formats(plan)) < 2:
        return {}
    layers = {
        stem(name): {"quant_algo": _ALGORITHMS[fmt], "group_size": _GROUP[fmt]} for name, fmt in plan.quantized.items()
    }
    return {"quantized_layers": layers}


def _plain(value: Any) -> Any:
    """The value without an order that means nothing."""
    return sorted(map(str, value)) if isinstance(value, list) else value


def _format(algorithm: object) -> str:
    fmt = _READ.get(str(algorithm).upper())
    if fmt is None:
        raise UnsupportedError(f"config.json: quant_algo is {algorithm!r}; swapq reads {', '.join(_READ)}")
    return fmt


def _quantized_layers(described: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    layers = described.get("quantized_layers") or {}
    if not isinstance(layers, dict) or not all(isinstance(entry, dict) for entry in layers.values()):
        raise CheckpointError("config.json: quantized_layers is no object of module names and what they are")
    return layers


def _entry_of(layers: Mapping[str, Any], module: str) -> str:
    """The entry that speaks of ``module``: its own, or that of a module around it, such as a stack of experts."""
    parts = module.split(".")
    for i in range(len(parts), 0, -1):
        if (name := ".".join(parts[:i])) in layers:
            return name
    raise CheckpointError(
        f"config.json: quantized_layers does not list {module}, which is stored quantized; the file and its config disagree"
    )
