"""What a recipe may say: the table of formats, and every check of a value or of a combination of values.

``FORMATS`` is the one place that says which rows may stand in front of which weights, and which gradients a format has.
"""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from swapq import formats
from swapq.anatomy.role import NEVER_QUANTIZED, QUANTIZABLE, Role
from swapq.errors import RecipeError

__all__ = [
    "BACKWARD_MODES",
    "FORMATS",
    "FormatRule",
    "Weights",
    "check_backward",
    "check_sides",
    "check_tokens_apart",
    "checked_activations",
    "checked_layers",
    "checked_patterns",
    "checked_weights",
    "nearest",
]


@dataclass(frozen=True, slots=True)
class FormatRule:
    """What may go together with weights of one format.

    Attributes:
        activations: formats that the rows in front of such weights may have.
        backward: backward modes that the format has (contract section 5).
        refused: backward mode that it has not -> the reason.
        no_rollout: why an engine should not serve such weights, or empty. ``force_rollout`` of a recipe overrules it.
    """

    activations: tuple[str, ...]
    backward: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    no_rollout: str = ""


_THREE = ("low_precision", "high_precision", "dequantized")
_INT4 = FormatRule(
    activations=("bf16",),
    backward=("high_precision", "dequantized"),
    refused={"low_precision": "its activations are BF16, so nothing is gained by quantizing gradients"},
)


#: format of weights that a recipe of this version can ask for -> what may go together with it
FORMATS: Mapping[str, FormatRule] = {
    "bf16": FormatRule(activations=("bf16",), backward=("bf16",)),
    "mxfp8": FormatRule(activations=("mxfp8",), backward=_THREE),
    "nvfp4": FormatRule(
        activations=("nvfp4",),
        backward=("high_precision", "dequantized"),
        refused={
            "low_precision": "quantizing gradients to 4 bits needs stochastic rounding and a Hadamard transform, which belong to "
            "pretraining (recipe 'nvfp4-pretrain')"
        },
    ),
    # "bf16": the one format whose rollout beside BF16 training is an established practice, so it is allowed and labelled
    "fp8_block": FormatRule(activations=("fp8_block",), backward=("bf16", *_THREE)),
    "int4": _INT4,
    "int4_g32": _INT4,
    "nvfp4_tile": FormatRule(
        activations=("nvfp4_tile",),
        backward=_THREE,
        no_rollout="its activations share one scale over all tokens of a batch, so a token's log-probability depends on its neighbours, "
        "and trainer and engine batch differently",
    ),
}
BACKWARD_MODES = ("bf16", "low_precision", "high_precision", "dequantized")
_PART = re.compile(r"[A-Za-z0-9_*\-]+")
_ROLES = tuple(role.value for role in QUANTIZABLE)


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


def checked_weights(value: object) -> Weights:
    """The ``weights`` of a recipe.

    Raises:
        RecipeError: no mapping, a role that has no format, or no format.
    """
    return _by_role("weights", value)


def _by_role(name: str, value: object) -> Weights:
    if not isinstance(value, Mapping):
        raise RecipeError(f"{name} is {value!r}, expected a mapping of roles to formats")
    chosen: dict[str, str] = {}
    for role, fmt in value.items():
        if role in NEVER_QUANTIZED:
            reason = NEVER_QUANTIZED[Role(role)]
            raise RecipeError(f"{name} names role {str(role)!r}, which always stays BF16: {reason}; leave it out")
        if role not in _ROLES:
            raise RecipeError(
                f"{name} names {role!r}, no role{nearest(str(role), _ROLES)}; roles with a format are {', '.join(_ROLES)}"
            )
        if not isinstance(fmt, str) or fmt not in FORMATS:
            raise RecipeError(
                f"{name}[{str(role)!r}] is {fmt!r}, no format{nearest(str(fmt), FORMATS)}; formats are {', '.join(FORMATS)}"
            )
        if fmt != "bf16":
            chosen[str(role)] = fmt
    return Weights((role, chosen[role]) for role in _ROLES if role in chosen)


def checked_activations(weights: Weights, value: object) -> str | Weights:
    """The ``activations`` of a recipe: one format, where every quantized role has the same, else role -> format.

    Raises:
        RecipeError: no format or mapping, rows quantized in front of a BF16 weight, or a pair that ``FORMATS`` does not allow.
    """
    if isinstance(value, Mapping):
        given = _by_role("activations", value)
    elif isinstance(value, str) and value in FORMATS:
        given = Weights((role, value) for role in weights)
        if not weights and value != "bf16":
            raise RecipeError(
                f"activations is {value!r} while every weight is bf16; rows are quantized only before a quantized weight"
            )
    else:
        raise RecipeError(
            f"activations is {value!r}{nearest(str(value), FORMATS)}; choose one of {', '.join(FORMATS)}, or a mapping of roles to "
            "formats"
        )
    for role, fmt in given.items():
        if role not in weights:
            raise RecipeError(
                f"activations[{role!r}] is {fmt!r} while {role} weights are bf16; rows are quantized only before a quantized weight"
            )
    for role, fmt in weights.items():
        _check_pair(role, fmt, given.get(role, "bf16"), weights)
    found = {given.get(role, "bf16") for role in weights} or {"bf16"}
    return found.pop() if len(found) == 1 else Weights((r, f) for r, f in given.items() if f != "bf16")


def _check_pair(role: str, weights: str, activations: str, every: Weights) -> None:
    if activations in FORMATS[weights].activations:
        return
    expected = {r: FORMATS[f].activations[0] for r, f in every.items()}
    same = set(expected.values())
    advice = f"set activations to {next(iter(same))!r}" if len(same) == 1 else f"set activations to {expected}"
    if FORMATS[weights].activations == ("bf16",):
        raise RecipeError(
            f"{role} weights are {weights}, a weight-only format, and their activations {activations}: rows stay bf16; {advice}"
        )
    if activations == "bf16":
        raise RecipeError(
            f"{role} weights are {weights} and their activations bf16 (weight-only): no recipe of this version computes that on both "
            f"sides; {advice}"
        )
    raise RecipeError(
        f"{role} weights are {weights} and their activations {activations}: both operands have one format; {advice}"
    )


def check_sides(weights: Weights, backward: object) -> None:
    """Refuse BF16 training of a quantized policy, which trains, and quietly trains another policy; except where ``FORMATS`` allows it.

    Raises:
        RecipeError: it is asked for.
    """
    alone = sorted({fmt for fmt in weights.values() if "bf16" not in FORMATS[fmt].backward})
    if alone and backward == "bf16":
        fmt = alone[0]
        modes = [mode for mode in BACKWARD_MODES if all(mode in FORMATS[f].backward for f in weights.values())]
        raise RecipeError(
            f"weights are {fmt} and backward is 'bf16', which is BF16 training with {fmt.upper()} rollout: the trainer would score "
            "another policy than the one that was sampled (measured for NVFP4: twice the log-probability mismatch of the matched "
            f"recipe); choose {' or '.join(repr(mode) for mode in modes)}"
        )


def check_backward(weights: Weights, backward: object) -> None:
    """The mode exists, for every format that the recipe uses.

    Raises:
        RecipeError: naming the format that has no such mode, and why.
    """
    if not isinstance(backward, str) or backward not in BACKWARD_MODES:
        raise RecipeError(
            f"backward is {backward!r}{nearest(str(backward), BACKWARD_MODES)}; choose one of {', '.join(BACKWARD_MODES)}"
        )
    if not weights and backward != "bf16":
        raise RecipeError(f"backward is {backward!r} while every weight is bf16; set backward to 'bf16'")
    for role, fmt in weights.items():
        if backward not in FORMATS[fmt].backward:
            reason = FORMATS[fmt].refused.get(backward, f"{fmt} has no such mode")
            modes = [m for m in BACKWARD_MODES if all(m in FORMATS[f].backward for f in weights.values())]
            advice = (
                f"choose {' or '.join(repr(mode) for mode in modes)}"
                if modes
                else "no mode exists for all of its formats"
            )
            raise RecipeError(f"backward is {backward!r} and {role} weights are {fmt}: {reason}; {advice}")


def check_tokens_apart(weights: Weights, expert_tp: int) -> None:
    """A scale over all tokens cannot be cut into one per slice of an expert.

    Raises:
        RecipeError: ``expert_tp`` above 1 beside such a format.
    """
    for role, fmt in weights.items():
        if expert_tp > 1 and formats.get(fmt).row_scope == "tensor":
            raise RecipeError(
                f"expert_tp is {expert_tp} and {role} weights are {fmt}, whose activations share one scale over all tokens; "
                "set expert_tp to 1"
            )


def checked_patterns(value: object) -> tuple[str, ...]:
    """The ``keep_bf16`` of a recipe, without repeats and without dots at the ends.

    Raises:
        RecipeError: no list of patterns made of dotted name parts.
    """
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


def checked_layers(name: str, value: object) -> int | float:
    """``first_layers_bf16`` or ``last_layers_bf16`` of a recipe.

    Raises:
        RecipeError: neither a count of layers nor a fraction below 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecipeError(f"{name} is {value!r}, expected a count of layers or a fraction below 1")
    if isinstance(value, int):
        if value < 0:
            raise RecipeError(f"{name} is {value}, expected 0 or more layers")
        return value
    if not 0 <= value < 1:
        raise RecipeError(
            f"{name} is {value}; a fraction is at least 0 and below 1, a count of layers is a whole number such as {_whole(value)}"
        )
    return value or 0


def _whole(value: float) -> int:
    return max(1, round(value)) if math.isfinite(value) else 4


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message: ``" (did you mean 'nvfp4'?)"``, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
