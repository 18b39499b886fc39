"""What ``swapq recipes`` prints: the named recipes and the support matrix."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from swapq.named_recipes import NOTES
from swapq.recipe import Recipe
from swapq.recipe_rules import FORMATS
from swapq.support import matrix, pair

__all__ = ["as_dict", "tables"]

_STYLES = {"matched": "green", "differs": "yellow", "forced": "yellow", "refused": "dim"}


def as_dict(recipes: Sequence[Recipe]) -> dict[str, Any]:
    """Plain JSON values."""
    described = [
        r.to_dict() | {"matched": r.matched, "policies": r.policies, "no_rollout": r.no_rollout, "note": NOTES[r.name]}
        for r in recipes
    ]
    return {"recipes": described, "support": [p._asdict() for p in matrix()]}


def tables(recipes: Sequence[Recipe]) -> Iterator[Table | str]:
    """The recipes, the matrix, and the reasons."""
    yield _recipes(recipes)
    yield ""
    yield _matrix()
    reasons: dict[str, dict[str, None]] = {}
    for p in matrix():
        reasons.setdefault(p.status, {})[p.reason] = None
    for status, why in reasons.items():
        yield f"{status}: {'; or '.join(why)}"


def _recipes(recipes: Sequence[Recipe]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("recipe", "weights", "activations", "backward", "BF16 exceptions", "what it is"):
        table.add_column(column, overflow="fold")
    for r in recipes:
        activations = r.activations if isinstance(r.activations, str) else _by_role(r.activations)
        table.add_row(
            r.name, _by_role(r.weights) or "bf16", activations, r.backward, _exceptions(r), NOTES.get(r.name, "")
        )
    return table


def _matrix() -> Table:
    table = Table(
        title="training (down) and rollout (across)",
        title_justify="left",
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    table.add_column("")
    for rollout in FORMATS:
        table.add_column(rollout)
    for training in FORMATS:
        cells = [pair(training, rollout).status for rollout in FORMATS]
        table.add_row(training, *(f"[{_STYLES[cell]}]{cell}[/]" for cell in cells))
    return table


def _by_role(formats: Mapping[str, str]) -> str:
    kinds = set(formats.values())
    if len(kinds) == 1 and len(formats) > 1:
        return f"{kinds.pop()}: {', '.join(formats)}"
    return ", ".join(f"{role} {fmt}" for role, fmt in formats.items())


def _exceptions(recipe: Recipe) -> str:
    said = [
        f"{what} {_amount(n)}"
        for what, n in (("first", recipe.first_layers_bf16), ("last", recipe.last_layers_bf16))
        if n
    ]
    return ", ".join([*said, *recipe.keep_bf16]) or "none"


def _amount(value: int | float) -> str:
    return f"{value} layers" if isinstance(value, int) else f"{value:.0%} of layers"
