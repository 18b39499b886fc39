"""What a quantized folder says of itself: layout, recipe and the exact list of quantized weights, whoever wrote it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from swapq.checkpoint import layouts
from swapq.checkpoint.layouts.base import stem
from swapq.checkpoint.record import RECORD_NAME, read_record
from swapq.errors import CheckpointError, RecipeError, UnsupportedError
from swapq.headers import Folder, read_json
from swapq.natural import natural_key
from swapq.recipe import Recipe

__all__ = ["Described", "describe_folder", "incomplete_experts"]


@dataclass(frozen=True)
class Described:
    """A folder's own description.

    Attributes:
        layout: ``swapq``, ``modelopt``, ``compressed-tensors``, or ``none`` for a folder that claims no quantization.
        quantized: weight -> format. From the list of layout ``swapq``; for the others, what the config covers and the headers hold.
        recipe: of layout ``swapq`` or of the completion record, else None.
        config: ``config.json``.
    """

    layout: str
    quantized: Mapping[str, str]
    recipe: Recipe | None
    config: Mapping[str, Any]


def describe_folder(folder: Folder) -> Described:
    """Read the config, and the completion record if there is one.

    Raises:
        CheckpointError: no config, a config that contradicts itself, or one of a method that is not known.
        RecipeError: a recipe that is not one.
    """
    config = read_json(folder.path / "config.json")
    described = config.get("quantization_config") or {}
    if not isinstance(described, dict):
        raise CheckpointError(f"config.json: quantization_config is {type(described).__name__}, expected an object")
    record = read_record(folder.path)
    recipe = None
    if record and isinstance(record.get("recipe"), dict):
        recipe = _recipe(record["recipe"], RECORD_NAME)
    method = str(described.get("quant_method") or "")
    if not method:
        return Described("none", {}, recipe, config)
    if method not in layouts.names():
        raise UnsupportedError(
            f"config.json: quant_method is {method!r}; swapq reads swapq, modelopt and compressed-tensors"
        )
    if method == "swapq":
        recipe = _recipe(described.get("recipe") or {}, "config.json: quantization_config")
    return Described(method, layouts.get(method).quantized(described, _scaled_modules(folder)), recipe, config)


def _recipe(fields: Any, where: str) -> Recipe:
    try:
        return Recipe.from_dict(fields)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def _scaled_modules(folder: Folder) -> list[str]:
    """Modules with block scales, in natural order."""
    return sorted((stem(n) for n in folder.tensors if n.endswith(".weight_scale")), key=natural_key)


def incomplete_experts(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """What some experts of a module have and others, up to the number in the config, have not: a sentence for each such kind."""
    counts = [config.get(k) for k in ("num_experts", "n_routed_experts", "num_local_experts")]
    text = config.get("text_config")
    if isinstance(text, dict):
        counts += [text.get(k) for k in ("num_experts", "n_routed_experts", "num_local_experts")]
    expected = next((c for c in counts if isinstance(c, int) and c > 0), None)
    if expected is None:
        return []
    seen: dict[tuple[str, str], set[int]] = {}
    for name in names:
        head, dot, tail = name.partition(".experts.")
        index, _, rest = tail.partition(".")
        if dot and index.isdigit():
            seen.setdefault((f"{head}.experts", rest), set()).add(int(index))
    found = []
    for (prefix, rest), having in seen.items():
        absent = next((i for i in range(expected) if i not in having), None)
        if absent is not None:
            found.append(
                f"{prefix}.{absent}.{rest}: missing; config.json says {expected} experts, {len(having)} have {rest}"
            )
    return found
