"""From names, shapes and a config to an Anatomy: the part that live models and checkpoints share."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from swapq.anatomy import experts as ex
from swapq.anatomy.config import EXPERT_COUNT_KEYS, decoder_layers, integer, model_type, text_config
from swapq.anatomy.family import FAMILIES, MODULE_LIST, Family
from swapq.anatomy.names import NameFacts, is_expertish, read_name
from swapq.anatomy.role import UNTOUCHED
from swapq.anatomy.tensor import Anatomy, ExpertsLayout, Quantization, TensorInfo
from swapq.errors import AnatomyError

__all__ = ["Raw", "assemble"]


@dataclass(frozen=True, slots=True)
class Raw:
    """One tensor before anything is known about it.

    ``linear_owner``: False where a live module says that it is no ``[N, K]`` linear. ``packed``: class of a live tensor that only
    pretends to have its dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    linear_owner: bool = True
    packed: str = ""


def assemble(
    raws: Iterable[Raw],
    config: Mapping[str, Any],
    *,
    source: Literal["model", "checkpoint"],
    where: str,
    module_list: bool,
    quantization: Quantization | None = None,
    given: Mapping[str, ExpertsLayout] | None = None,
) -> Anatomy:
    """The anatomy of tensors under a config.

    ``module_list``: whether experts of an unknown family may be read as a ``ModuleList`` of linears. ``given``: layouts that live
    modules carry already, by prefix.

    Raises:
        AnatomyError: an unknown family with experts, or tensors that are incomplete or disagree with the config.
    """
    raws, given = list(raws), given or {}
    text, kind = text_config(config), model_type(config)
    family = FAMILIES.get(kind)
    if family is None:
        family = _unknown(raws, text, kind, where, module_list, given)
    facts = [read_name(raw.name, family, None) for raw in raws]
    num_layers = decoder_layers(text, (f.layer for f in facts if f.layer is not None))
    facts = [
        f if f.layer is None or f.layer < num_layers else read_name(raw.name, family, num_layers)
        for raw, f in zip(raws, facts, strict=True)
    ]
    layouts, spare = _layouts(raws, facts, family, text, source == "checkpoint", quantization, given)
    by_prefix = {**spare, **layouts}
    tensors = tuple(_info(raw, fact, by_prefix.get(fact.prefix), family) for raw, fact in zip(raws, facts, strict=True))
    return Anatomy(
        family=family.name if layouts or kind in FAMILIES else "dense",
        tensors=tensors,
        experts=tuple(sorted(layouts.values(), key=lambda layout: layout.layer)),
        num_layers=num_layers,
        source=source,
        quantization=quantization,
        spelling=family,
        model_type=kind,
    )


def _unknown(
    raws: list[Raw],
    text: Mapping[str, Any],
    kind: str,
    where: str,
    module_list: bool,
    given: Mapping[str, ExpertsLayout],
) -> Family:
    facts = [(raw, read_name(raw.name, MODULE_LIST, None)) for raw in raws]
    experts = [(raw, f) for raw, f in facts if f.prefix and f.note not in UNTOUCHED and f.prefix not in given]
    strange = [raw.name for raw, f in facts if f.note not in UNTOUCHED and not f.prefix and is_expertish(raw.name)]
    claims = integer(text, *EXPERT_COUNT_KEYS) or 0
    if not experts and not strange and (claims <= 1 or given):
        return MODULE_LIST
    if module_list and experts and not strange and all(f.expert is not None for _, f in experts):
        spelled: dict[str, set[str]] = {}
        for raw, f in experts:
            if raw.linear_owner and f.owner:
                spelled.setdefault(f.prefix, set()).add(f.owner)
        if all(raw.linear_owner for raw, _ in experts) and (found := ex.module_list_family(spelled)) is not None:
            return found
    seen = experts[0][0].name if experts else strange[0] if strange else f"config says {claims} experts"
    raise AnatomyError(
        f"{where}: model_type {kind!r} has routed experts ({seen}) in a layout that swapq does not know, and it never guesses one from "
        f"shapes; known families are {', '.join(sorted(FAMILIES))}, and live models with a ModuleList of nn.Linear experts"
    )


def _layouts(
    raws: list[Raw],
    facts: list[NameFacts],
    family: Family,
    text: Mapping[str, Any],
    disk: bool,
    quantization: Quantization | None,
    given: Mapping[str, ExpertsLayout],
) -> tuple[dict[str, ExpertsLayout], dict[str, ExpertsLayout]]:
    """Layouts of the decoder's experts and of those that stay untouched, by source prefix."""
    if (
        quantization is not None
        and quantization.stored
        and not quantization.is_block_fp8
        and quantization.method != "swapq"
    ):
        return {}, {}
    shapes = quantization is None or quantization.is_block_fp8 or not quantization.stored
    untouched = {f.prefix for f in facts if f.prefix and f.note in UNTOUCHED}
    groups = ex.collect((r.name, r.shape, f) for r, f in zip(raws, facts, strict=True) if not _is_scale(f))
    found: tuple[dict[str, ExpertsLayout], dict[str, ExpertsLayout]] = dict(given), {}
    for prefix, group in groups.items():
        if prefix not in given:
            found[prefix in untouched][prefix] = ex.layout(group, family, text, disk=disk, shapes=shapes)
    return found


def _is_scale(facts: NameFacts) -> bool:
    return facts.note.startswith("scale")


def _info(raw: Raw, facts: NameFacts, layout: ExpertsLayout | None, family: Family) -> TensorInfo:
    expert = ex.slot(facts, layout, family) if facts.prefix else None
    dims = 3 if expert is not None and expert.fused else 2
    linear = facts.linear and raw.linear_owner and len(raw.shape) == dims and facts.note not in UNTOUCHED
    return TensorInfo(raw.name, facts.role, raw.shape, raw.dtype, facts.layer, expert, linear, facts.note)
