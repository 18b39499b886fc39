"""The named recipes as tiny models can follow them: their inner length is no multiple of 128, so INT4 comes in groups of 32."""

from collections.abc import Mapping
from typing import Any

from swapq.recipe import Recipe

__all__ = ["SERVED", "tiny"]

_OVERRIDES = {"int4-qat": {"weights": {"routed_experts": "int4_g32"}}}
#: quantized recipes that an engine may serve
SERVED = ["nvfp4-rl", "mxfp8-rl", "fp8-block-rl", "fp8-rollout", "int4-qat"]


def tiny(recipe: str | Mapping[str, Any], **overrides: object) -> Recipe:
    """The recipe called so, or of these fields, with some fields replaced."""
    named = _OVERRIDES.get(recipe, {}) if isinstance(recipe, str) else {}
    return Recipe.resolve(recipe, **(named | overrides))
