"""Recipe: the frozen choice that decides, once, what every tensor is. Combinations that cannot be exact fail at construction.

A recipe names roles, never tensors; ``swapq.plan`` resolves it against one model. What may be combined is in ``recipe_rules``.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from swapq.errors import RecipeError
from swapq.named_recipes import NAMED
from swapq.recipe_rules import (
    BACKWARD_MODES,
    FORMATS,
    Weights,
    check_backward,
    check_sides,
    check_tokens_apart,
    checked_activations,
    checked_layers,
    checked_patterns,
    checked_weights,
    nearest,
)

__all__ = ["BACKWARD_MODES", "FORMATS", "Recipe", "Weights", "names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One choice of formats for a whole model, the same for the trainer and the rollout engine.

    Make one with :meth:`named` and overrides; every value is checked, and a refused one says why.

    Attributes:
        name: what the recipe is called in reports; no part of the arithmetic.
        weights: role -> format. A role left out stays BF16. Routers, embeddings, lm_head and norms cannot be named.
        activations: format that rows are quantized to in front of a quantized weight: one for all, or role -> format where roles
            differ. ``FORMATS`` says which may stand before which weights.
        backward: arithmetic of the gradients: ``low_precision``, ``high_precision``, ``dequantized``, or ``bf16`` where no weight
            is quantized, or where training is BF16 and the weights' format is the rollout's alone. Every format of ``weights`` must have
            the mode.
        keep_bf16: patterns of tensors that stay BF16, matched on whole dotted parts anywhere in a name; ``*`` is a wildcard
            inside one part.
        first_layers_bf16: decoder layers at the start that stay BF16: a count, or a fraction below 1.
        last_layers_bf16: the same at the end.
        expert_tp: tensor-parallel size of the experts in the engine; one NVFP4 row scale spans ``intermediate / expert_tp``.
        force_rollout: serve a policy that should not be rolled out (``nvfp4-pretrain``) all the same.

    Raises:
        RecipeError: a value that is not one, or a combination that is refused.
    """

    name: str
    weights: Mapping[str, str] = dataclasses.field(default_factory=Weights)
    activations: str | Mapping[str, str] = "bf16"
    backward: str = "bf16"
    keep_bf16: tuple[str, ...] = ()
    first_layers_bf16: int | float = 0
    last_layers_bf16: int | float = 0
    expert_tp: int = 1
    force_rollout: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise RecipeError(f"name is {self.name!r}, expected a non-empty string")
        weights = checked_weights(self.weights)
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "keep_bf16", checked_patterns(self.keep_bf16))
        for field in ("first_layers_bf16", "last_layers_bf16"):
            object.__setattr__(self, field, checked_layers(field, getattr(self, field)))
        if type(self.expert_tp) is not int or self.expert_tp < 1:
            raise RecipeError(f"expert_tp is {self.expert_tp!r}, expected a whole number of at least 1")
        if not isinstance(self.force_rollout, bool):
            raise RecipeError(f"force_rollout is {self.force_rollout!r}, expected true or false")
        check_sides(weights, self.backward)
        object.__setattr__(self, "activations", checked_activations(weights, self.activations))
        check_backward(weights, self.backward)
        check_tokens_apart(weights, self.expert_tp)

    @classmethod
    def named(cls, name: str, **overrides: Any) -> Self:
        """The recipe called ``name`` with some fields replaced: ``Recipe.named("nvfp4-rl", last_layers_bf16=4)``.

        Raises:
            RecipeError: an unknown name or field, or a refused value.
        """
        if not isinstance(name, str) or name not in NAMED:
            raise RecipeError(f"unknown recipe {name!r}{nearest(str(name), NAMED)}; there are {', '.join(NAMED)}")
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
            fields = {**_read(Path(recipe)), **overrides}
            try:
                return cls.from_dict(fields)
            except RecipeError as error:
                raise RecipeError(f"recipe file {Path(recipe)}: {error}") from None
        if isinstance(recipe, str):
            return cls.named(recipe, **overrides)
        raise RecipeError(f"a recipe is a name, a Recipe, a dict or a .json file; got {type(recipe).__name__}")

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The recipe with these fields; the opposite of :meth:`to_dict`.

        Where ``name`` is a named recipe, fields left out are that recipe's: ``{"name": "nvfp4-rl", "last_layers_bf16": 4}``.

        Raises:
            RecipeError: an unknown or missing key, a name that is no named recipe's without ``weights``, or a refused value.
        """
        if not isinstance(fields, Mapping):
            raise RecipeError(f"fields of a recipe are {type(fields).__name__}, expected a dict")
        known = [field.name for field in dataclasses.fields(cls)]
        for key in fields:
            if key not in known:
                raise RecipeError(
                    f"unknown recipe key {key!r}{nearest(str(key), known)}; the keys are {', '.join(known)}"
                )
        if "name" not in fields:
            raise RecipeError("a recipe needs a name")
        name = fields["name"]
        if "weights" not in fields and isinstance(name, str) and name and name not in NAMED:
            raise RecipeError(  # a misspelt name would be a recipe that quantizes nothing
                f"name is {name!r}, no named recipe{nearest(name, NAMED)}, and there are no weights; named recipes are "
                f"{', '.join(NAMED)}, any other says its weights (an empty mapping keeps all BF16)"
            )
        return cls(**{**(NAMED.get(name, {}) if isinstance(name, str) else {}), **fields})

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields replaced and everything checked again.

        Raises:
            RecipeError: an unknown field or a refused value.
        """
        return self.from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values of every field; ``force_rollout`` only where it is set."""
        forced = {"force_rollout": True} if self.force_rollout else {}
        return {
            "name": self.name,
            "weights": dict(self.weights),
            "activations": self.activations if isinstance(self.activations, str) else dict(self.activations),
            "backward": self.backward,
            "keep_bf16": list(self.keep_bf16),
            "first_layers_bf16": self.first_layers_bf16,
            "last_layers_bf16": self.last_layers_bf16,
            "expert_tp": self.expert_tp,
        } | forced

    @property
    def id(self) -> str:
        """Twelve hex digits that are equal for equal recipes, on every machine and version of Python."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def format_of(self, role: str) -> str:
        """Format of a role's weights, before exceptions: ``bf16`` where the recipe does not name it."""
        return self.weights.get(role, "bf16")

    def activations_of(self, role: str) -> str:
        """Format of the rows in front of a role's weights: ``bf16`` where the weights are not quantized."""
        if role not in self.weights:
            return "bf16"
        return self.activations if isinstance(self.activations, str) else self.activations.get(role, "bf16")

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats other than ``bf16`` that the recipe gives to weights, sorted."""
        return tuple(sorted(set(self.weights.values())))

    @property
    def matched(self) -> bool:
        """Whether trainer and rollout engine compute one policy. False where training is BF16 and the rollout is not."""
        return not self.weights or self.backward != "bf16"

    @property
    def policies(self) -> str:
        """Both sides in words: ``training bf16, rollout fp8_block: two different policies``."""
        served = " + ".join(self.formats) or "bf16"
        if self.matched:
            return f"training and rollout {served}: one policy"
        return f"training bf16, rollout {served}: two different policies"

    @property
    def no_rollout(self) -> str:
        """Why an engine must not serve this policy, or empty: nothing speaks against it, or ``force_rollout`` is set."""
        reasons = (FORMATS[fmt].no_rollout for fmt in self.formats)
        return "" if self.force_rollout else next((reason for reason in reasons if reason), "")

    def require_rollout(self, what: str) -> None:
        """Refuse to give an engine what it should not serve.

        Args:
            what: what was about to be done, as the start of the message.

        Raises:
            RecipeError: with the reason.
        """
        if self.no_rollout:
            raise RecipeError(
                f"{what}: recipe {self.name!r} is not for rollouts: {self.no_rollout}; train and save masters with save_pretrained, "
                "use 'nvfp4-rl' for RL, or set force_rollout=True in the recipe"
            )

    @staticmethod
    def layer_count(value: int | float, num_layers: int) -> int:
        """Layers meant by a count or a fraction of ``num_layers``, rounded to nearest (halves up): 0.15 of 48 is 7."""
        return value if isinstance(value, int) else math.floor(value * num_layers + 0.5)


def names() -> list[str]:
    """Names that :meth:`Recipe.named` knows."""
    return list(NAMED)


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
