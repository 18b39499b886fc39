"""Recipe: the frozen choice that decides, once, what every tensor is. Combinations that cannot be exact fail at construction.

A recipe names roles, never tensors; ``swapq.plan`` resolves it against one model.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from swapq.anatomy.role import NEVER_QUANTIZED, QUANTIZABLE, Role
from swapq.errors import RecipeError

__all__ = ["BACKWARD_MODES", "FORMATS", "Recipe", "Weights", "names", "planned"]

#: formats a recipe of this version can ask for, and the backward modes each has (contract section 5)
FORMATS: Mapping[str, tuple[str, ...]] = {
    "bf16": ("bf16",),
    "mxfp8": ("low_precision", "high_precision", "dequantized"),
    "nvfp4": ("high_precision", "dequantized"),
}
#: formats of recipes that are designed but not in this version
LATER_FORMATS = ("fp8_block", "int4")
BACKWARD_MODES = ("bf16", "low_precision", "high_precision", "dequantized")
_PART = re.compile(r"[A-Za-z0-9_*\-]+")


class Weights(Mapping[str, str]):
    """Role -> format of a recipe: frozen, hashable, picklable, in the order of the roles. Roles left out are ``bf16``."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[tuple[str, str]] = ()) -> None:
        self._items = dict(items)

    def __getitem__(self, role: str) -> str:
        return self._items[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)

    def __reduce__(self) -> tuple[Any, ...]:
        return Weights, (tuple(self._items.items()),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One choice of formats for a whole model, the same for the trainer and the rollout engine.

    Make one with :meth:`named` and overrides; every value is checked, and a refused one says why.

    Attributes:
        name: what the recipe is called in reports; no part of the arithmetic.
        weights: role -> format. A role left out stays BF16. Routers, embeddings, lm_head and norms cannot be named.
        activations: format that rows are quantized to in front of a quantized weight; the format of those weights.
        backward: arithmetic of the gradients: ``low_precision``, ``high_precision``, ``dequantized``, or ``bf16`` where no weight
            is quantized.
        keep_bf16: patterns of tensors that stay BF16, matched on whole dotted parts anywhere in a name; ``*`` is a wildcard
            inside one part.
        first_layers_bf16: decoder layers at the start that stay BF16: a count, or a fraction below 1.
        last_layers_bf16: the same at the end.
        expert_tp: tensor-parallel size of the experts in the engine; one NVFP4 row scale spans ``intermediate / expert_tp``.

    Raises:
        RecipeError: a value that is not one, or a combination that is refused.
    """

    name: str
    weights: Mapping[str, str] = dataclasses.field(default_factory=Weights)
    activations: str = "bf16"
    backward: str = "bf16"
    keep_bf16: tuple[str, ...] = ()
    first_layers_bf16: int | float = 0
    last_layers_bf16: int | float = 0
    expert_tp: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise RecipeError(f"name is {self.name!r}, expected a non-empty string")
        object.__setattr__(self, "weights", _weights(self.weights))
        object.__setattr__(self, "keep_bf16", _patterns(self.keep_bf16))
        for field in ("first_layers_bf16", "last_layers_bf16"):
            object.__setattr__(self, field, _layers(field, getattr(self, field)))
        if type(self.expert_tp) is not int or self.expert_tp < 1:
            raise RecipeError(f"expert_tp is {self.expert_tp!r}, expected a whole number of at least 1")
        _check_sides(self)
        _check_activations(self)
        _check_backward(self)

    @classmethod
    def named(cls, name: str, **overrides: Any) -> Self:
        """The recipe called ``name`` with some fields replaced: ``Recipe.named("nvfp4-rl", last_layers_bf16=4)``.

        Raises:
            RecipeError: an unknown name or field, a recipe of a later version, or a refused value.
        """
        if not isinstance(name, str) or (name not in _NAMED and name not in _LATER):
            raise RecipeError(f"unknown recipe {name!r}{_nearest(str(name), _NAMED)}; there are {', '.join(_NAMED)}")
        return cls.from_dict({"name": name, **overrides})

    @classmethod
    def resolve(cls, recipe: "str | Recipe | Mapping[str, Any] | os.PathLike[str]", **overrides: Any) -> Self:
        """A recipe from a recipe, a name, a dict of fields, or a ``.json`` file of fields, with some fields replaced.

        Raises:
            RecipeError: what was given is none of these, or is refused.
        """
        if isinstance(recipe, Recipe):
            return cls.from_dict({**recipe.to_dict(), **overrides})
        if isinstance(recipe, Mapping):
            return cls.from_dict({**recipe, **overrides})
        if isinstance(recipe, os.PathLike) or (isinstance(recipe, str) and recipe.endswith(".json")):
            return cls.from_dict({**_read(Path(recipe)), **overrides})
        if isinstance(recipe, str):
            return cls.named(recipe, **overrides)
        raise RecipeError(f"a recipe is a name, a Recipe, a dict or a .json file; got {type(recipe).__name__}")

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The recipe with these fields; the opposite of :meth:`to_dict`.

        Where ``name`` is a named recipe, fields left out are that recipe's: ``{"name": "nvfp4-rl", "last_layers_bf16": 4}``.

        Raises:
            RecipeError: an unknown or missing key, a recipe of a later version, or a refused value.
        """
        if not isinstance(fields, Mapping):
            raise RecipeError(f"fields of a recipe are {type(fields).__name__}, expected a dict")
        known = [field.name for field in dataclasses.fields(cls)]
        for key in fields:
            if key not in known:
                raise RecipeError(
                    f"unknown recipe key {key!r}{_nearest(str(key), known)}; the keys are {', '.join(known)}"
                )
        if "name" not in fields:
            raise RecipeError("a recipe needs a name")
        name = fields["name"]
        if isinstance(name, str) and name in _LATER:
            raise RecipeError(
                f"recipe {name!r} ({_LATER[name]}) is planned, not in this version; there are {', '.join(_NAMED)}"
            )
        return cls(**{**(_NAMED.get(name, {}) if isinstance(name, str) else {}), **fields})

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields replaced and everything checked again.

        Raises:
            RecipeError: an unknown field or a refused value.
        """
        return self.from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values of every field."""
        return {
            "name": self.name,
            "weights": dict(self.weights),
            "activations": self.activations,
            "backward": self.backward,
            "keep_bf16": list(self.keep_bf16),
            "first_layers_bf16": self.first_layers_bf16,
            "last_layers_bf16": self.last_layers_bf16,
            "expert_tp": self.expert_tp,
        }

    @property
    def id(self) -> str:
        """Twelve hex digits that are equal for equal recipes, on every machine and version of Python."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def format_of(self, role: str) -> str:
        """Format of a role's weights, before exceptions: ``bf16`` where the recipe does not name it."""
        return self.weights.get(role, "bf16")

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats other than ``bf16`` that the recipe gives to weights, sorted."""
        return tuple(sorted(set(self.weights.values())))

    @staticmethod
    def layer_count(value: int | float, num_layers: int) -> int:
        """Layers meant by a count or a fraction of ``num_layers``, rounded to nearest (halves up): 0.15 of 48 is 7."""
        return value if isinstance(value, int) else math.floor(value * num_layers + 0.5)


def names() -> list[str]:
    """Names that :meth:`Recipe.named` knows."""
    return list(_NAMED)


def planned() -> dict[str, str]:
    """Names of recipes that are designed but not in this version, with what they are."""
    return dict(_LATER)


_NAMED: dict[str, dict[str, Any]] = {
    "bf16": {},
    "mxfp8-rl": {
        "weights": {role.value: "mxfp8" for role in QUANTIZABLE},
        "activations": "mxfp8",
        "backward": "low_precision",
    },
    "nvfp4-rl": {
        "weights": {Role.routed_experts.value: "nvfp4"},
        "activations": "nvfp4",
        "backward": "dequantized",
        "last_layers_bf16": 0.15,
    },
}

_LATER: dict[str, str] = {
    "fp8-block-rl": "FP8 with 128x128 weight blocks and 1x128 activation blocks on both sides",
    "fp8-rollout": "BF16 training, FP8-block rollout",
    "int4-qat": "INT4 routed experts, fake-quantized in training",
    "nvfp4-pretrain": "NVFP4 with stochastic rounding and a random Hadamard transform, not for RL",
}


def _weights(value: object) -> Weights:
    if not isinstance(value, Mapping):
        raise RecipeError(f"weights is {value!r}, expected a mapping of roles to formats")
    allowed = [role.value for role in QUANTIZABLE]
    chosen: dict[str, str] = {}
    for role, fmt in value.items():
        if role in NEVER_QUANTIZED:
            reason = NEVER_QUANTIZED[Role(role)]
            raise RecipeError(f"weights names role {str(role)!r}, which always stays BF16: {reason}; leave it out")
        if role not in allowed:
            raise RecipeError(
                f"weights names {role!r}, no role{_nearest(str(role), allowed)}; roles with a format are {', '.join(allowed)}"
            )
        if fmt in LATER_FORMATS:
            raise RecipeError(f"weights[{str(role)!r}] is {fmt!r}, a format that is planned, not in this version")
        if not isinstance(fmt, str) or fmt not in FORMATS:
            raise RecipeError(
                f"weights[{str(role)!r}] is {fmt!r}, no format{_nearest(str(fmt), FORMATS)}; formats are {', '.join(FORMATS)}"
            )
        if fmt != "bf16":
            chosen[str(role)] = fmt
    return Weights((role, chosen[role]) for role in allowed if role in chosen)


def _patterns(value: object) -> tuple[str, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RecipeError(f"keep_bf16 is {value!r}, expected a list of patterns such as ['kv_b_proj', 'layers.3.mlp']")
    cleaned: list[str] = []
    for pattern in value:
        if not isinstance(pattern, str):
            raise RecipeError(f"keep_bf16 holds {pattern!r}, expected a string")
        parts = pattern.strip(".").split(".")
        if pattern.startswith("re:") or not all(_PART.fullmatch(part) for part in parts):
            raise RecipeError(
                f"keep_bf16 pattern {pattern!r} is not made of dotted name parts; letters, digits, '_', '-' and the wildcard '*' "
                "inside a part are understood, regular expressions are not"
            )
        if (clean := ".".join(parts)) not in cleaned:
            cleaned.append(clean)
    return tuple(cleaned)


def _layers(field: str, value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecipeError(f"{field} is {value!r}, expected a count of layers or a fraction below 1")
    if isinstance(value, int):
        if value < 0:
            raise RecipeError(f"{field} is {value}, expected 0 or more layers")
        return value
    if not 0 <= value < 1:
        raise RecipeError(
            f"{field} is {value}; a fraction is at least 0 and below 1, a count of layers is a whole number such as {_whole(value)}"
        )
    return value or 0


def _whole(value: float) -> int:
    return max(1, round(value)) if math.isfinite(value) else 4


def _check_sides(recipe: Recipe) -> None:
    """BF16 training of a quantized policy: the one combination that trains, and quietly trains another policy."""
    if recipe.formats and recipe.backward == "bf16":
        fmt = recipe.formats[0]
        raise RecipeError(
            f"weights are {fmt} and backward is 'bf16', which is BF16 training with {fmt.upper()} rollout: the trainer would score "
            "another policy than the one that was sampled (measured for NVFP4: twice the log-probability mismatch of the matched "
            f"recipe); choose {' or '.join(repr(mode) for mode in FORMATS[fmt])}"
        )


def _check_activations(recipe: Recipe) -> None:
    formats = recipe.formats
    if not isinstance(recipe.activations, str) or recipe.activations not in FORMATS:
        raise RecipeError(
            f"activations is {recipe.activations!r}{_nearest(str(recipe.activations), FORMATS)}; choose one of {', '.join(FORMATS)}"
        )
    if not formats:
        if recipe.activations != "bf16":
            raise RecipeError(
                f"activations is {recipe.activations!r} while every weight is bf16; rows are quantized only before a quantized weight"
            )
        return
    if len(formats) > 1:
        raise RecipeError(
            f"weights mixes {' and '.join(formats)}, and `activations` is one format for the whole recipe; choose one of them, "
            "other roles stay bf16"
        )
    if recipe.activations == "bf16":
        raise RecipeError(
            f"weights are {formats[0]} and activations bf16 (weight-only): no recipe of this version computes that on both sides; "
            f"set activations to {formats[0]!r}"
        )
    if recipe.activations != formats[0]:
        raise RecipeError(
            f"weights are {formats[0]} and activations {recipe.activations}: both operands have one format; "
            f"set activations to {formats[0]!r}"
        )


def _check_backward(recipe: Recipe) -> None:
    if recipe.backward not in BACKWARD_MODES:
        raise RecipeError(
            f"backward is {recipe.backward!r}{_nearest(str(recipe.backward), BACKWARD_MODES)}; choose one of {', '.join(BACKWARD_MODES)}"
        )
    fmt = recipe.activations
    if recipe.backward in FORMATS[fmt]:
        return
    if fmt == "bf16":
        raise RecipeError(f"backward is {recipe.backward!r} while every weight is bf16; set backward to 'bf16'")
    raise RecipeError(
        "backward is 'low_precision' and weights are nvfp4: quantizing gradients to 4 bits needs stochastic rounding and a Hadamard "
        "transform, which belong to pretraining; choose 'dequantized' or 'high_precision'"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise RecipeError(f"recipe file {path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"recipe file {path}: not readable as JSON ({error})") from None
    if not isinstance(fields, dict):
        raise RecipeError(f"recipe file {path}: holds {type(fields).__name__}, expected an object of recipe fields")
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"key {twice!r} appears twice")
    return fields


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
