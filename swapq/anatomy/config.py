"""Reading a model's config, live or from ``config.json``, as one plain dict of the language model."""

from collections.abc import Iterable, Mapping
from typing import Any

from swapq.errors import AnatomyError

__all__ = ["EXPERT_COUNT_KEYS", "as_dict", "decoder_layers", "integer", "model_type", "text_config"]

#: every spelling of "how many experts" that a config may use
EXPERT_COUNT_KEYS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_routed_experts",
    "moe_num_experts",
    "n_experts",
)
_TEXT_KEYS = ("text_config", "language_config", "llm_config")


def as_dict(config: object) -> dict[str, Any]:
    """A live model's config as the dict that ``config.json`` would hold; empty where the model has none."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    to_dict = getattr(config, "to_dict", None)
    values = dict(to_dict()) if callable(to_dict) else dict(vars(config))
    stated = getattr(config, "model_type", None)  # to_dict gives the class's, whatever the object says
    return {**values, "model_type": stated} if isinstance(stated, str) else values


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    thinker = config.get("thinker_config")
    if isinstance(thinker, Mapping):
        return text_config(thinker)
    for key in _TEXT_KEYS:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            return inner
    return config


def model_type(config: Mapping[str, Any]) -> str:
    """``model_type`` of the whole model, empty where the config has none."""
    value = config.get("model_type") or ""
    return value if isinstance(value, str) else ""


def integer(config: Mapping[str, Any], *keys: str) -> int | None:
    """Value of the first key that holds a whole number, None without one.

    Raises:
        AnatomyError: a value that is negative.
    """
    for key in keys:
        value = config.get(key)
        if type(value) is int:
            if value < 0:
                raise AnatomyError(f"config says {key} = {value}")
            return value
    return None


def decoder_layers(config: Mapping[str, Any], seen: Iterable[int]) -> int:
    """Number of decoder layers: what the config says, else one more than the highest layer seen."""
    kinds = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if isinstance(kinds, list | str):
        return len(kinds)
    stated = integer(config, "num_hidden_layers", "num_layers", "n_layer", "n_layers")
    return stated if stated is not None else max(seen, default=-1) + 1
