"""The rules of a plan: which tensor gets which format and why, and every refusal, from an anatomy and a recipe alone."""

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swapq.anatomy import FAMILIES, QUANTIZABLE, Anatomy, ExpertsLayout, Role, TensorInfo
from swapq.anatomy.names import FUSED_GROUPS, live_spelling
from swapq.anatomy.role import ALWAYS_KEPT, NEVER_QUANTIZED, UNTOUCHED
from swapq.errors import PlanError
from swapq.plan_lengths import check_lengths
from swapq.recipe import Recipe

__all__ = ["Decision", "Verdict", "decide"]

#: a linear with fewer outputs (q/k/v and gate/up counted together) is a gate or a head: kept, since a GEMM kernel pads it anyway
MIN_ROWS = 16
_SOURCES = (torch.bfloat16, torch.float16, torch.float32)
_KEPT_NOTES = frozenset(ALWAYS_KEPT.values())


@dataclass(frozen=True, slots=True)
class Decision:
    """Format of one tensor (``bf16``: stays as it is; ``dropped``: a scale that dissolves into its weight) and the reason."""

    format: str
    reason: str


@dataclass(slots=True)
class Verdict:
    """Decisions in the order of the anatomy's tensors, and what the reader should know besides."""

    decisions: list[Decision]
    first: int
    last: int
    patterns: dict[str, dict[str, int]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def decide(anatomy: Anatomy, recipe: Recipe, *, tp: int, ep: int) -> Verdict:
    """Resolve ``recipe`` against ``anatomy`` for an engine with ``tp`` and ``ep`` ranks.

    Raises:
        PlanError: what :func:`swapq.plan` lists.
    """
    for name, value in (("tp", tp), ("ep", ep)):
        if type(value) is not int or value < 1:
            raise PlanError(f"{name} is {value!r}, expected a whole number of at least 1")
    _check_source(anatomy)
    first, last = _layer_counts(anatomy, recipe)
    kept = _pattern_hits(anatomy, recipe)
    layers = _kept_layers(anatomy, recipe, first, last)
    fp8 = {t.name for t in anatomy.tensors if t.dtype == torch.float8_e4m3fn}
    _check_parametrized(anatomy, recipe, kept, layers)
    decisions = [_decide(t, recipe, fp8, kept.get(t.name, ""), layers) for t in anatomy.tensors]
    verdict = Verdict(decisions, first, last)
    _skip_small(anatomy, verdict)
    _check_groups(anatomy, verdict)
    check_lengths(anatomy, recipe, [d.format for d in verdict.decisions], tp, ep)
    _check_any(anatomy, recipe, verdict)
    verdict.patterns = _pattern_roles(anatomy, recipe, kept)
    verdict.warnings = _warnings(anatomy, recipe, verdict, tp, ep)
    return verdict


def _decide(info: TensorInfo, recipe: Recipe, fp8: set[str], pattern: str, layers: dict[int, str]) -> Decision:
    if info.name.endswith("_scale_inv") and info.name.removesuffix("_scale_inv") in fp8:
        return Decision("dropped", "scale of an FP8 weight: dissolves into it")
    if info.note in UNTOUCHED:
        return Decision("bf16", UNTOUCHED[info.note])
    if info.role in NEVER_QUANTIZED:
        what = info.note or info.role.value
        return Decision(
            "bf16", f"{what}: never quantized" if info.role is not Role.other else "role other: no recipe reaches it"
        )
    if not info.linear:
        return Decision("bf16", info.note or ("no linear weight" if len(info.shape) > 1 else "vector"))
    fmt = recipe.format_of(info.role)
    if fmt == "bf16":
        verb = "stay" if info.role.value.endswith("s") else "stays"
        return Decision("bf16", f"{info.role.value} {verb} BF16 in {recipe.name}")
    if pattern:
        return Decision("bf16", f"keep_bf16 pattern {pattern!r}")
    if info.layer is not None and info.layer in layers:
        return Decision("bf16", layers[info.layer])
    if info.note in _KEPT_NOTES:
        return Decision("bf16", f"{info.note}: stays BF16 in every recipe")
    return Decision(fmt, f"{info.role.value} in {recipe.name}")


def _check_source(anatomy: Anatomy) -> None:
    for info in anatomy.tensors if anatomy.source == "model" else ():
        if ".base_layer." in info.name or ".lora_A." in info.name:
            raise PlanError(f"{info.name} belongs to an adapter; convert the model first, then add adapters")
    quantization = anatomy.quantization
    if quantization is None:
        for info in anatomy.tensors:
            if info.linear and info.dtype not in _SOURCES:
                raise PlanError(f"{info.name} is {info.dtype}; weights are read as bfloat16, float16 or float32")
        return
    if quantization.method == "swapq":
        raise PlanError(
            f"{quantization.where}: this {anatomy.source} is already converted by swapq; start from its BF16 source"
        )
    if not quantization.stored:
        raise PlanError(
            f"{quantization.where} says quant_method {quantization.method!r}, and every weight in the files is stored unquantized; "
            "remove the stale entry, or download the right files"
        )
    if quantization.method == "undeclared":
        raise PlanError(
            f"{quantization.where}: low-precision weights and no quantization_config that explains them; nobody knows their values"
        )
    if not quantization.is_block_fp8:
        raise PlanError(
            f"{quantization.where}: the {anatomy.source} is already quantized (quant_method {quantization.method!r}); start from the "
            "BF16 weights (block-FP8 with weight_block_size is the one quantized source that is read)"
        )
    for info in anatomy.tensors:
        if info.linear and info.dtype not in (*_SOURCES, torch.float8_e4m3fn):
            raise PlanError(
                f"{info.name} is {info.dtype}, in a block-FP8 source: expected float8_e4m3fn or an unquantized dtype"
            )


def _check_parametrized(anatomy: Anatomy, recipe: Recipe, kept: dict[str, str], layers: dict[int, str]) -> None:
    for info in anatomy.tensors:
        stays = recipe.format_of(info.role) == "bf16" or info.name in kept or info.layer in layers
        if ".parametrizations." in info.name and not stays:
            raise PlanError(
                f"{info.name} stands in for a weight that is computed anew in each forward (torch parametrization), which no format "
                "would reach; convert the model first, or keep it in BF16 (`keep_bf16`)"
            )


def _layer_counts(anatomy: Anatomy, recipe: Recipe) -> tuple[int, int]:
    total = anatomy.num_layers
    first = Recipe.layer_count(recipe.first_layers_bf16, total)
    last = Recipe.layer_count(recipe.last_layers_bf16, total)
    if first + last > total:
        raise PlanError(
            f"first_layers_bf16 = {recipe.first_layers_bf16} and last_layers_bf16 = {recipe.last_layers_bf16} keep {first} + {last} "
            f"layers in BF16; the model has {total}"
        )
    return first, last


def _kept_layers(anatomy: Anatomy, recipe: Recipe, first: int, last: int) -> dict[int, str]:
    total = anatomy.num_layers
    reasons = {
        i: f"first {first} of {total} layers (first_layers_bf16 = {recipe.first_layers_bf16})" for i in range(first)
    }
    return reasons | {
        i: f"last {last} of {total} layers (last_layers_bf16 = {recipe.last_layers_bf16})"
        for i in range(total - last, total)
    }


def _spellings(anatomy: Anatomy, info: TensorInfo, layout: ExpertsLayout | None) -> set[str]:
    """Every name under which a user may know a whole tensor: as it is, on the Hub, live, and as a part of the live fused tensor."""
    names = {info.name, anatomy.hub_name(info.name), live_spelling(info.name, anatomy.spelling)}
    if layout is not None and info.expert is not None and not info.expert.fused and info.linear:
        names.add(layout.hub_weight(info.expert.expert or 0, info.expert.projection))  # type: ignore[arg-type]
        fused = "down_proj" if info.expert.projection == "down" else ("gate_up_proj" if layout.gated else "up_proj")
        names |= {f"{layout.prefix}.{fused}", f"{layout.hub_prefix}.{fused}"}
    return names


def _pattern_hits(anatomy: Anatomy, recipe: Recipe) -> dict[str, str]:
    """Source name -> the first pattern that keeps it."""
    if not recipe.keep_bf16:
        return {}
    patterns = [
        (p, re.compile(rf"(?:^|\.){re.escape(p).replace(re.escape('*'), '[^.]*')}(?:\.|$)")) for p in recipe.keep_bf16
    ]
    unused, seen = dict.fromkeys(recipe.keep_bf16), set[str]()
    kept: dict[str, str] = {}
    for info in anatomy.tensors:
        layout = anatomy.layout_of(info)
        names = _spellings(anatomy, info, layout)
        seen.update(names)
        for pattern, regex in patterns:
            if not (any(regex.search(name) for name in names) or _matches_stack(anatomy, info, layout, pattern, regex)):
                continue
            unused.pop(pattern, None)
            kept.setdefault(info.name, pattern)
    if unused:
        pattern = next(iter(unused))
        raise PlanError(
            f"keep_bf16 pattern {pattern!r} matches no tensor of this {anatomy.source}{_nearest(pattern, seen)}"
        )
    _check_stacks(anatomy, recipe, kept)
    return kept


def _matches_stack(
    anatomy: Anatomy, info: TensorInfo, layout: ExpertsLayout | None, pattern: str, regex: re.Pattern[str]
) -> bool:
    if layout is None or info.expert is None or not info.expert.fused or not info.linear:
        return False
    names = anatomy.hub_weights(info)
    hits = [name for name in names if regex.search(name)]
    if hits and len(hits) < len(names):
        other = next(name for name in names if name not in set(hits))
        raise PlanError(
            f"keep_bf16 pattern {pattern!r} keeps {hits[0]} and not {other}; both are parts of {info.name}, and one layer's experts "
            f"are one stacked tensor with one format: keep {layout.prefix!r} as a whole"
        )
    return bool(hits)


def _check_stacks(anatomy: Anatomy, recipe: Recipe, kept: dict[str, str]) -> None:
    if recipe.format_of(Role.routed_experts) == "bf16":
        return
    split: dict[str, tuple[list[str], list[str]]] = {}
    for info in anatomy.tensors:
        layout = anatomy.layout_of(info) if info.linear else None
        if layout is not None:
            split.setdefault(layout.prefix, ([], []))[info.name in kept].append(info.name)
    for prefix, (quantized, bf16) in split.items():
        if quantized and bf16:
            raise PlanError(
                f"keep_bf16 pattern {kept[bf16[0]]!r} keeps {bf16[0]} and not {quantized[0]}; the experts of one layer are one module "
                f"with one format: keep {prefix!r} as a whole"
            )


def _pattern_roles(anatomy: Anatomy, recipe: Recipe, kept: dict[str, str]) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = {pattern: Counter() for pattern in recipe.keep_bf16}
    for info in anatomy.tensors:
        if info.name in kept:
            counts[kept[info.name]][info.role.value] += 1
    return {pattern: dict(count) for pattern, count in counts.items()}


def _groups(anatomy: Anatomy) -> dict[tuple[str, int], list[int]]:
    """Positions of the linears that an engine builds as one layer; a linear without siblings is a group of its own."""
    groups: dict[tuple[str, int], list[int]] = {}
    for i, info in enumerate(anatomy.tensors):
        if not info.linear or info.expert is not None:
            continue
        parent, _, owner = info.name.removesuffix(".weight").rpartition(".")
        number = next((n for n, names in enumerate(FUSED_GROUPS) if owner in names), None)
        groups.setdefault((parent, number) if number is not None else (info.name, -1), []).append(i)
    return groups


def _skip_small(anatomy: Anatomy, verdict: Verdict) -> None:
    for members in _groups(anatomy).values():
        rows = sum(anatomy.tensors[i].shape[0] for i in members)
        if rows < MIN_ROWS:
            for i in members:
                if verdict.decisions[i].format not in ("bf16", "dropped"):
                    verdict.decisions[i] = Decision(
                        "bf16", f"only {rows} output rows, fewer than {MIN_ROWS}: nothing to gain"
                    )


def _check_groups(anatomy: Anatomy, verdict: Verdict) -> None:
    for members in _groups(anatomy).values():
        if len({verdict.decisions[i].format for i in members}) > 1:
            said = "; ".join(
                f"{anatomy.tensors[i].name} {verdict.decisions[i].format} ({verdict.decisions[i].reason})"
                for i in members
            )
            raise PlanError(
                f"an engine builds these as one layer, so they need one format: {said}; keep all of them in BF16 or none"
            )


def _check_any(anatomy: Anatomy, recipe: Recipe, verdict: Verdict) -> None:
    if not recipe.formats or any(d.format not in ("bf16", "dropped") for d in verdict.decisions):
        return
    roles = ", ".join(recipe.weights)
    eligible = [i for i, t in enumerate(anatomy.tensors) if t.linear and recipe.format_of(t.role) != "bf16"]
    if not eligible:
        what = "no expert" if set(recipe.weights) == {Role.routed_experts.value} else "no tensor"
        raise PlanError(
            f"recipe {recipe.name!r} quantizes {roles} and matched {what} in this {anatomy.family} {anatomy.source}"
            f"{_unmatched(anatomy)}"
        )
    reasons = Counter(verdict.decisions[i].reason for i in eligible)
    said = "; ".join(f"{count} by {reason}" for reason, count in reasons.most_common(4))
    raise PlanError(
        f"recipe {recipe.name!r} quantizes {roles} and every such tensor is kept in BF16: {said}; drop an exception, or use recipe 'bf16'"
    )


def _unmatched(anatomy: Anatomy) -> str:
    """Why nothing was matched, and what to do: the end of a message."""
    if any(t.linear and t.role in QUANTIZABLE for t in anatomy.tensors):
        return (
            ""
            if anatomy.experts
            else ", which has no routed experts; 'mxfp8-rl' and 'fp8-block-rl' quantize attention and MLPs"
        )
    roles = (*QUANTIZABLE, Role.other)
    strange = next((t.name for t in anatomy.tensors if len(t.shape) == 2 and t.role in roles), "")
    return (
        f": model_type {anatomy.model_type!r} is none of the families that swapq knows ({', '.join(sorted(FAMILIES))}), nor do its linears "
        "have the names of dense models in the spelling of Llama and Qwen (q_proj, o_proj, gate_proj, down_proj)"
        + (f"; one of them is {strange}" if strange else "")
    )


def _warnings(anatomy: Anatomy, recipe: Recipe, verdict: Verdict, tp: int, ep: int) -> list[str]:
    found: list[str] = [] if recipe.matched else [f"{recipe.policies}; their mismatch is logged in every step"]
    if recipe.no_rollout:
        found.append(
            f"not for RL rollouts: {recipe.no_rollout}; export, conversion and sync refuse it (`force_rollout`)"
        )
    for name, count in (("first_layers_bf16", verdict.first), ("last_layers_bf16", verdict.last)):
        value = getattr(recipe, name)
        if value and not count:
            found.append(f"{name} = {value} of {anatomy.num_layers} layers rounds to no layer")
    engine_tp = 1 if ep > 1 else tp
    if recipe.format_of(Role.routed_experts) == "nvfp4" and recipe.expert_tp != engine_tp:
        found.append(
            f"expert_tp is {recipe.expert_tp} and this engine cuts experts into {engine_tp}: it will refuse; set expert_tp={engine_tp}"
        )
    experts = {layout.num_experts for layout in anatomy.experts}
    uneven = sorted(n for n in experts if n % ep)
    if uneven:
        found.append(f"{uneven[0]} experts over ep = {ep} ranks are uneven")
    refused = next((layout for layout in anatomy.experts if layout.unreadable), None)
    if refused is not None and recipe.format_of(Role.routed_experts) != "bf16":
        found.append(f"conversion and export refuse it: {refused.unreadable} ({anatomy.family}); it can be trained")
    if any(d.format == "dropped" for d in verdict.decisions):
        found.append("block-FP8 source: weights that stay unquantized are written as BF16")
    return found


def _nearest(pattern: str, names: set[str]) -> str:
    last = pattern.rsplit(".", 1)[-1]
    depth = pattern.count(".") + 1
    candidates = {
        ".".join(parts[i : i + depth]) for parts in (n.split(".") for n in names) for i in range(len(parts) - depth + 1)
    }
    close = difflib.get_close_matches(pattern, _fewer(candidates), n=3, cutoff=0.5) or difflib.get_close_matches(
        last, _fewer(candidates), n=3
    )
    return (
        f"; nearest are {', '.join(repr(c) for c in close)}" if close else "; see `swapq plan` without it for the names"
    )


def _fewer(candidates: set[str]) -> Sequence[str]:
    """At most a few thousand candidates, those without numbers first, so that a large model answers at once."""
    return sorted(candidates, key=lambda c: (sum(ch.isdigit() for ch in c), c))[:4000]
