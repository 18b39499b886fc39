"""Layout ``compressed-tensors``: ``nvfp4-pack-quantized`` and ``mxfp8-quantized``, as llm-compressor writes them and vLLM reads them.

NVFP4's global scale is stored inverted (2688 / amax, a divisor) with shape [1]; ``input_global_scale`` is the neutral 1.0, since the
recipe's scale of activations is one per token, computed online.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from swapq.checkpoint.layouts.base import Layout, Stored, kept_modules, part_shapes, stem
from swapq.errors import UnsupportedError
from swapq.formats import Parts
from swapq.formats.nvfp4 import NVFP4
from swapq.plan import Plan

__all__ = ["CompressedTensorsLayout"]

_FORMATS = {"nvfp4": "nvfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}


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
        found = sorted(set(plan.quantized.values()))
        if len(found) > 1:
            raise UnsupportedError(
                f"layout 'compressed-tensors' is written for one format, the recipe has {' and '.join(found)}; choose layout 'modelopt'"
            )
        if not found:
            return {}
        scheme = {
            "targets": ["Linear"],
            "weights": _arguments(found[0], dynamic=False),
            "input_activations": _arguments(found[0], dynamic="local" if found[0] == "nvfp4" else True),
            "output_activations": None,
            "format": _FORMATS[found[0]],
        }
        return {
            "quant_method": "compressed-tensors",
            "format": _FORMATS[found[0]],
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "ignore": kept_modules(plan),
            "config_groups": {"group_0": scheme},
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
