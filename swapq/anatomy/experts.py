"""Putting the tensors of each layer's experts together, and refusing what is incomplete or disagrees with the config."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from swapq.anatomy.config import integer
from swapq.anatomy.family import MODULE_LIST, Family
from swapq.anatomy.names import NameFacts, hub_spelling, live_spelling
from swapq.anatomy.tensor import ExpertsLayout, ExpertSlot
from swapq.errors import AnatomyError

__all__ = ["Group", "collect", "layout", "module_list_family", "slot"]

_SIDES = ("gate", "up", "down")
_SPELLINGS: tuple[tuple[str | None, str, str], ...] = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    (None, "up_proj", "down_proj"),
)


@dataclass(slots=True)
class Group:
    """Tensors under one ``experts`` prefix: fused weights by projection, per-expert weights by (expert, projection)."""

    prefix: str
    layer: int
    fused: dict[str, tuple[int, ...]] = field(default_factory=dict)
    single: dict[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    biased: bool = False
    unknown: list[str] = field(default_factory=list)


def collect(tensors: Iterable[tuple[str, tuple[int, ...], NameFacts]]) -> dict[str, Group]:
    """Groups by prefix, in the order in which they appear."""
    groups: dict[str, Group] = {}
    for name, shape, facts in tensors:
        if not facts.prefix:
            continue
        group = groups.get(facts.prefix)
        if group is None:
            group = groups[facts.prefix] = Group(facts.prefix, facts.layer or 0)
        if not facts.projection:
            group.unknown.append(name)
        elif not facts.linear:
            group.biased |= facts.leaf.endswith("bias")
        elif facts.expert is None:
            group.fused[facts.projection] = shape
        else:
            group.single[facts.expert, facts.projection] = shape
    return groups


def layout(
    group: Group, family: Family, config: Mapping[str, Any], *, disk: bool, shapes: bool = True
) -> ExpertsLayout:
    """The layout of one group.

    ``disk``: shapes are those of a file. ``shapes``: False where the source is quantized in a way that hides them; the sizes then
    come from the config.

    Raises:
        AnatomyError: a tensor of the group has an unknown name, experts are missing or too many, or shapes disagree with each
            other or with the config.
    """
    if group.unknown and shapes:
        raise AnatomyError(
            f"{family.name}: {_some(group.unknown)} is no tensor of routed experts that swapq knows in this family"
        )
    if group.fused and group.single:
        raise AnatomyError(f"{group.prefix} holds fused tensors and tensors of single experts")
    stated = integer(config, *family.num_experts)
    kind: Literal["fused", "modulelist"] = "fused" if group.fused else "modulelist"
    build = _fused if group.fused else _single
    num_experts, hidden, intermediate, transposed = build(group, family, config, stated, disk, shapes)
    fused = kind == "fused"
    return ExpertsLayout(
        prefix=live_spelling(group.prefix, family) if disk else group.prefix,
        hub_prefix=hub_spelling(group.prefix, family),
        layer=group.layer,
        num_experts=num_experts,
        hidden=hidden,
        intermediate=intermediate,
        gated=family.gated,
        transposed=fused and transposed,
        interleaved=fused and family.interleaved,
        has_bias=group.biased,
        kind=kind,
        gate_up_name="gate_up_proj" if fused and family.gated else None,
        up_name=None if fused and family.gated else ("up_proj" if fused else family.projections[1]),
        down_name="down_proj" if fused else family.projections[2],
        hub_gate=family.projections[0],
        hub_up=family.projections[1],
        hub_down=family.projections[2],
    )


def slot(facts: NameFacts, layout: ExpertsLayout | None, family: Family) -> ExpertSlot | None:
    """Place of one routed expert's tensor; None where its name says none. Without a layout the family's table counts."""
    if not facts.projection:
        return None
    fused = facts.expert is None
    gate_up = facts.projection == "gate_up"
    return ExpertSlot(
        projection=facts.projection,  # type: ignore[arg-type]  # the name tables hold only these words
        expert=facts.expert,
        fused=fused,
        transposed=fused and (layout.transposed if layout else family.transposed),
        interleaved=fused and gate_up and family.interleaved,
    )


def module_list_family(spelled: Mapping[str, set[str]]) -> Family | None:
    """The family of a ``ModuleList`` whose experts all spell their projections in one known way; None where they do not.

    ``spelled``: projection names of the experts by prefix.
    """
    for projections in _SPELLINGS:
        if spelled and all(found == {part for part in projections if part} for found in spelled.values()):
            return replace(MODULE_LIST, projections=projections)
    return None


def _single(
    group: Group, family: Family, config: Mapping[str, Any], stated: int | None, disk: bool, shapes: bool
) -> tuple[int, int, int, bool]:
    sides = tuple(side for side, part in zip(_SIDES, family.projections, strict=True) if part)
    parts = dict(zip(_SIDES, family.projections, strict=True))
    held = {expert for expert, _ in group.single}
    count = stated if stated is not None else max(held, default=-1) + 1
    where = "config" if stated is not None else "highest expert"
    absent = (
        f"{group.prefix}.{e}.{parts[s]}.weight" for e in range(count) for s in sides if (e, s) not in group.single
    )
    missing = list(islice(absent, len(held) + 5))  # the count is the config's, which may claim a billion
    if missing:
        raise AnatomyError(
            f"{group.prefix}: the {where} says {count} experts, {len(held)} are there; missing {_some(missing)}; download the model again "
            "or correct its config"
        )
    if len(held) > count:
        raise AnatomyError(
            f"{group.prefix}: the config says {count} experts, {len(held)} are there, such as {max(held)}; correct one"
        )
    if not shapes:
        return count, *_config_sizes(group, family, config), False
    intermediate, hidden = group.single[0, "up"] if len(group.single[0, "up"]) == 2 else (0, 0)
    for (expert, side), shape in group.single.items():
        expected = (hidden, intermediate) if side == "down" else (intermediate, hidden)
        if shape != expected:
            name = f"{group.prefix}.{expert}.{parts[side]}.weight"
            raise AnatomyError(f"{name} is {list(shape)}, expected {list(expected)} as in expert 0")
    _check_sizes(group, family, config, hidden, intermediate)
    return count, hidden, intermediate, False


def _fused(
    group: Group, family: Family, config: Mapping[str, Any], stated: int | None, disk: bool, shapes: bool
) -> tuple[int, int, int, bool]:
    first = "gate_up" if family.gated else "up"
    for projection in (first, "down"):
        if projection not in group.fused:
            raise AnatomyError(
                f"{group.prefix}.{projection}_proj is missing; there is {_some([f'{p}_proj' for p in group.fused])}"
            )
    if extra := sorted(set(group.fused) - {first, "down"}):
        raise AnatomyError(
            f"{group.prefix}.{extra[0]}_proj: {family.name} has no such tensor beside {first}_proj and down_proj"
        )
    if not shapes:
        if stated is None:
            raise AnatomyError(
                f"{group.prefix}: the config does not say how many experts there are ({', '.join(family.num_experts)})"
            )
        return stated, *_config_sizes(group, family, config), family.transposed
    for projection, shape in group.fused.items():
        if len(shape) != 3:
            raise AnatomyError(
                f"{group.prefix}.{projection}_proj is {list(shape)}, expected three dimensions [experts, out, in]"
            )
    sides = 2 if family.gated else 1
    up, down = group.fused[first], group.fused["down"]
    transposed = family.transposed
    if disk and family.disk_transposed == "either":
        transposed = _orientation(group, family, config, up, sides)
    experts, inner, hidden = (up[0], up[2], up[1]) if transposed else up
    intermediate = inner // sides
    expected = (experts, intermediate, hidden) if transposed else (experts, hidden, intermediate)
    if inner % sides or down != expected:
        raise AnatomyError(
            f"{group.prefix}: {first}_proj is {list(up)} and down_proj {list(down)}, which do not fit each other as "
            f"{'[E, in, out]' if transposed else '[E, out, in]'}"
        )
    if stated is not None and stated != experts:
        raise AnatomyError(
            f"{group.prefix}: the config says {stated} experts, the tensors hold {experts}; one of the two is wrong"
        )
    _check_sizes(group, family, config, hidden, intermediate)
    return experts, hidden, intermediate, transposed


def _orientation(group: Group, family: Family, config: Mapping[str, Any], up: tuple[int, ...], sides: int) -> bool:
    hidden, intermediate = _config_sizes(group, family, config)
    straight, turned = (sides * intermediate, hidden), (hidden, sides * intermediate)
    if straight == turned:
        raise AnatomyError(
            f"{group.prefix}: {family.name} files come in both orientations, which {list(up[1:])} cannot tell apart"
        )
    if up[1:] not in (straight, turned):
        raise AnatomyError(
            f"{group.prefix}.gate_up_proj is {list(up)}; the config makes it [E, {straight[0]}, {hidden}] or [E, {hidden}, {straight[0]}]"
        )
    return up[1:] == turned


def _config_sizes(group: Group, family: Family, config: Mapping[str, Any]) -> tuple[int, int]:
    hidden, intermediate = integer(config, *family.hidden), integer(config, *family.intermediate)
    if hidden is None or intermediate is None:
        raise AnatomyError(
            f"{group.prefix}: the config lacks {' or '.join((*family.hidden, *family.intermediate))}, which this family needs"
        )
    return hidden, intermediate


def _check_sizes(group: Group, family: Family, config: Mapping[str, Any], hidden: int, intermediate: int) -> None:
    for what, keys, found in (
        ("row length", family.hidden, hidden),
        ("inner length", family.intermediate, intermediate),
    ):
        key = next((k for k in keys if integer(config, k) is not None), None)
        if key is not None and config[key] != found:
            raise AnatomyError(
                f"{group.prefix}: the config says {key} = {config[key]}, the tensors have {what} {found}; one of the two is wrong"
            )


def _some(names: list[str], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
