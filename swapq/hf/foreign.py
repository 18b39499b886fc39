"""Quantized checkpoints of others (ModelOpt, compressed-tensors; NVFP4 or MXFP8) opened as swapq models that hold their codes.

ModelOpt folders open by ``from_pretrained`` alone once swapq is imported. transformers has a reader of its own for compressed-tensors, so
those are opened with ``from_pretrained(folder, config=swapq.hf.foreign_config(folder))``. Saved again, either is of layout ``swapq``.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from swapq import anatomy, formats
from swapq.anatomy import Anatomy
from swapq.checkpoint import layouts
from swapq.checkpoint.layouts.base import stem
from swapq.errors import CheckpointError
from swapq.headers import TensorHeader
from swapq.nn.storage import QuantizedStorage
from swapq.recipe import FORMATS, Recipe

__all__ = ["ForeignConfig", "foreign_config", "read_names", "recipe_for", "stored_names", "translated"]

Headers = Mapping[str, tuple[str, TensorHeader]]


@register_quantization_config("swapq-foreign")
class ForeignConfig(QuantizationConfigMixin):
    """The ``quantization_config`` that another tool wrote, kept as it is until the headers say which weights are quantized."""

    def __init__(self, quant_method: str = "modelopt", **described: Any) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]
        self.described: dict[str, Any] = described.pop("original", None) or {"quant_method": quant_method, **described}

    @property
    def layout(self) -> str:
        """Name of the layout."""
        return str(self.described.get("quant_method"))

    def quantized(self, headers: Headers) -> dict[str, str]:
        """Weight -> format of every weight that has block scales in the files, or that the config names.

        Raises:
            CheckpointError, UnsupportedError: see :meth:`swapq.checkpoint.layouts.Layout.quantized`.
        """
        scaled = [stem(name) for name in headers if name.endswith(".weight_scale")]
        return layouts.get(self.layout).quantized(self.described, scaled)

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": "swapq-foreign", "original": self.described}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


register_quantization_config("modelopt")(ForeignConfig)


def foreign_config(directory: "str | os.PathLike[str]", **kwargs: Any) -> PretrainedConfig:
    """The config of a quantized folder of another tool, for ``from_pretrained(folder, config=...)`` to open it as a swapq model.

    Raises:
        CheckpointError: the folder's config claims no quantization of a kind that swapq reads.
    """
    config = AutoConfig.from_pretrained(directory, **kwargs)
    described: Any = getattr(config, "quantization_config", None)
    if isinstance(described, QuantizationConfigMixin):
        described = described.to_dict()
    if not isinstance(described, dict) or described.get("quant_method") not in ("modelopt", "compressed-tensors"):
        method = described.get("quant_method") if isinstance(described, dict) else None
        raise CheckpointError(
            f"{directory}: quant_method is {method!r}; swapq opens modelopt and compressed-tensors folders"
        )
    config.quantization_config = {"quant_method": "swapq-foreign", "original": described}
    return config


def recipe_for(model: PreTrainedModel, quantized: Mapping[str, str]) -> Recipe:
    """The recipe that quantizes exactly the weights in ``quantized``.

    Raises:
        CheckpointError: no quantized weight, one that the model does not have, experts of one layer that are quantized in part, or
            two formats in one role.
    """
    found = anatomy.of_model(model)
    if not quantized:
        raise CheckpointError("the checkpoint holds no quantized weights; open it without its quantization_config")
    roles: dict[str, str] = {}
    kept: dict[str, dict[str, None]] = {}
    known: set[str] = set()
    for info in found.tensors:
        if not info.linear:
            continue
        names = found.hub_weights(info)
        known.update(names)
        here = [quantized[name] for name in names if name in quantized]
        if here and (len(here) != len(names) or len(set(here)) > 1):
            kinds = " and ".join(sorted(set(here)))
            raise CheckpointError(
                f"{info.name}: {len(here)} of its {len(names)} expert weights are quantized, as {kinds}; one layer's experts have one "
                "format"
            )
        if here and roles.setdefault(info.role.value, here[0]) != here[0]:
            raise CheckpointError(
                f"{info.name} is {here[0]} and other {info.role.value} weights are {roles[info.role.value]}; swapq opens folders "
                "where a role has one format"
            )
        if not here:
            kept.setdefault(info.role.value, {})[_pattern(info.name, found, info)] = None
    unknown = sorted(set(quantized) - known)
    if unknown:
        raise CheckpointError(
            f"{unknown[0]}: quantized in the files, and no linear or expert of this model ({len(unknown)} such weights)"
        )
    patterns = tuple(name for role in roles for name in kept.get(role, ()))
    return Recipe(
        name="foreign",
        weights=roles,
        activations={role: FORMATS[fmt].activations[0] for role, fmt in roles.items()},
        backward="dequantized",
        keep_bf16=patterns,
        first_layers_bf16=0,
        last_layers_bf16=0,
        expert_tp=1,
    )


def _pattern(name: str, found: Anatomy, info: Any) -> str:
    layout = found.layout_of(info)
    return layout.prefix if layout is not None else name.removesuffix(".weight")


def stored_names(module: QuantizedStorage, layout: str) -> list[str]:
    """Names of every tensor that the layout stores for one swapped module's weights."""
    fmt = module.spec.weights
    block = formats.get(fmt).block
    return [s.name for weight in module.hub_weights() for s in layouts.get(layout).stored(weight, fmt, (block, block))]


def read_names(weight: str, fmt: str, layout: str) -> list[str]:
    """Names of the tensors that one weight is read from: scales of activations are not among them."""
    block = formats.get(fmt).block
    stored = layouts.get(layout).stored(weight, fmt, (block, block))
    return [s.name for s in stored if "input" not in s.name.rpartition(".")[2]]


def translated(weight: str, fmt: str, layout: str, read: Any) -> dict[str, Tensor]:
    """The tensors of one weight of any layout under the names of layout ``swapq``.

    Args:
        read: ``name -> tensor``; raises CheckpointError for a name that is not there.
    """
    tensors = {name: read(name) for name in read_names(weight, fmt, layout)}
    if layout == "swapq":
        return tensors
    parts = layouts.get(layout).decode(weight, fmt, tensors)
    scales = parts.scales.view(torch.uint8) if parts.scales.dtype == torch.float8_e8m0fnu else parts.scales
    scale_2 = None if parts.global_scale is None else parts.global_scale.float().reshape(())
    return layouts.get("swapq").encode(weight, fmt, parts._replace(scales=scales, global_scale=scale_2))
