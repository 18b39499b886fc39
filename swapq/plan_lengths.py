"""Lengths against blocks: what a format, or an engine that cuts tensors over ranks, could not hold is refused before anything is made."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from swapq import formats
from swapq.anatomy import Anatomy, ExpertsLayout, TensorInfo
from swapq.anatomy.names import FUSED_GROUPS, ROW_PARALLEL
from swapq.errors import PlanError
from swapq.named_recipes import NAMED
from swapq.recipe import Recipe

__all__ = ["check_lengths"]

_SHOWN = 4
_NUMBER = re.compile(r"\.\d+(?=[.': ])")  # of a layer or an expert, in a dotted name

#: projections of key and value heads, which an engine replicates where there are fewer heads than ranks
_MAYBE_REPLICATED = frozenset({"k_proj", "v_proj", "to_k", "to_v", "wk", "wv", "key", "value"})


def check_lengths(anatomy: Anatomy, recipe: Recipe, chosen: Sequence[str], tp: int, ep: int) -> None:
    """Every quantized length fits its format's blocks, also on each of ``tp`` ranks and under the recipe's ``expert_tp``.

    Args:
        chosen: format of each of the anatomy's tensors.

    Raises:
        PlanError: naming up to four kinds of tensors by their first, with its length, the block, what to do, and how many are alike.
    """
    problems: list[str] = []
    done: set[str] = set()
    for info, fmt in zip(anatomy.tensors, chosen, strict=True):
        if fmt in ("bf16", "dropped"):
            continue
        layout = anatomy.layout_of(info)
        if layout is None:
            problems += _linear_lengths(info, fmt, recipe, tp)
        elif layout.prefix not in done:
            done.add(layout.prefix)
            problems += _expert_lengths(layout, fmt, recipe, 1 if ep > 1 else tp)
            if ep > layout.num_experts:
                problems.append(f"{layout.prefix} has {layout.num_experts} experts, fewer than ep = {ep}")
    if problems:
        kinds = list(_alike(problems))
        more = f" (and {len(kinds) - _SHOWN} kinds of tensors more)" if len(kinds) > _SHOWN else ""
        said = "; ".join(kinds[:_SHOWN]) + more
        raise PlanError(said + _in_a_file(recipe, said))


def _in_a_file(recipe: Recipe, advice: str) -> str:
    """How a command, which has no option for fields of a recipe, follows the advice."""
    fields: dict[str, Any] = {"name": recipe.name}
    if "int4_g32" in advice:
        fields["weights"] = {role: "int4_g32" if fmt == "int4" else fmt for role, fmt in recipe.weights.items()}
    elif "keep_bf16" in advice:
        fields["keep_bf16"] = [*recipe.keep_bf16, "..."]
    if len(fields) == 1:
        return ""
    what = (
        f"with {json.dumps(fields)}"
        if recipe.name in NAMED
        else f"with this in it: {json.dumps(fields)[1:-1].partition(', ')[2]}"
    )
    return f". On the command line: --recipe FILE.json, {what}"


def _alike(problems: Sequence[str]) -> Iterable[str]:
    """One line for those that differ in the numbers of layers or experts alone: the first, and how many there are."""
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(_NUMBER.sub(".N", problem), []).append(problem)
    for first, *others in kinds.values():
        yield first + (f" (and {len(others)} more like it)" if others else "")


def _linear_lengths(info: TensorInfo, fmt: str, recipe: Recipe, tp: int) -> Iterable[str]:
    rows, length = info.shape
    owner = info.name.removesuffix(".weight").rpartition(".")[2]
    group = next((names for names in FUSED_GROUPS if owner in names), frozenset({owner}))
    advice = f"add {' and '.join(repr(part) for part in sorted(group))} to keep_bf16"
    yield from _cut(info.name, length, tp if owner in ROW_PARALLEL else 1, fmt, f"tp = {tp}", advice)
    yield from _rows(info.name, rows, fmt, recipe, advice)
    tile = formats.get(fmt).tile_rows
    if owner not in ROW_PARALLEL | _MAYBE_REPLICATED and rows % tp == 0 and tp > 1 and rows // tp % tile:
        yield f"{info.name}: {rows} rows over tp = {tp} are {rows // tp} a rank, not a multiple of the {fmt} tile of {tile}; {advice}"


def _expert_lengths(layout: ExpertsLayout, fmt: str, recipe: Recipe, tp: int) -> Iterable[str]:
    up, down = f"{layout.prefix} gate and up" if layout.gated else f"{layout.prefix} up", f"{layout.prefix} down"
    advice = f"add {layout.prefix!r} to keep_bf16"
    yield from _cut(up, layout.hidden, 1, fmt, "", advice)
    alone = list(_cut(down, layout.intermediate, 1, fmt, "", advice))
    yield from alone
    if not alone:
        yield from _cut(
            down, layout.intermediate, tp, fmt, f"tp = {tp}", "use a smaller tp, or expert parallelism (ep)"
        )
        if recipe.expert_tp != tp:
            yield from _cut(
                down,
                layout.intermediate,
                recipe.expert_tp,
                fmt,
                f"expert_tp = {recipe.expert_tp}",
                "use a smaller expert_tp",
            )
    yield from _rows(down, layout.hidden, fmt, recipe, advice)


def _cut(name: str, length: int, parts: int, fmt: str, why: str, advice: str) -> Iterable[str]:
    form = formats.get(fmt)
    block = form.block
    if length % block and (not form.partial_blocks or parts > 1):
        smaller = "give this role the format int4_g32, or " if fmt == "int4" and length % 32 == 0 else ""
        yield f"{name}: length {length} is not a multiple of the {fmt} block of {block}; {smaller}{advice}"
    elif parts > 1 and (length % parts or (length // parts) % block):
        share = f"{length / parts:g}"
        yield f"{name}: length {length} over {why} is {share} a rank, not a multiple of the {fmt} block of {block}; {advice}"


def _rows(name: str, rows: int, fmt: str, recipe: Recipe, advice: str) -> Iterable[str]:
    form = formats.get(fmt)
    block = form.block
    if recipe.backward == "low_precision" and rows % block and not form.partial_blocks:
        yield (
            f"{name}: {rows} output rows are not a multiple of the {fmt} block of {block}, along which backward 'low_precision' "
            f"quantizes; choose another backward, or {advice}"
        )
