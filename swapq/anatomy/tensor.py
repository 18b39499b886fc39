"""What anatomy says about a model: one line per tensor, one layout per experts module, and the names they have on the Hub."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from swapq.anatomy.family import Family
from swapq.anatomy.names import hub_spelling
from swapq.anatomy.role import Role
from swapq.errors import AnatomyError

__all__ = ["Anatomy", "ExpertSlot", "ExpertsLayout", "Projection", "Quantization", "TensorInfo"]

Projection = Literal["gate", "up", "down"]


@dataclass(frozen=True, slots=True)
class ExpertSlot:
    """Where a routed expert's tensor sits.

    ``expert`` is None where one 3-D tensor holds all experts (``fused``). ``transposed``: stored ``[E, in, out]``.
    ``interleaved``: gate and up rows alternate instead of standing one block after the other.
    """

    projection: Literal["gate_up", "gate", "up", "down"]
    expert: int | None
    fused: bool
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a model or checkpoint.

    Attributes:
        name: as the source spells it.
        role: what it is.
        shape: as the source stores it.
        dtype: as the source stores it.
        layer: decoder layer, None outside the decoder layers and in next-token modules with a numbering of their own.
        expert: set for tensors of routed experts.
        linear: a ``[N, K]`` weight (or a stack of them) that a format may apply to.
        note: why a tensor is special, such as ``next-token layer``, ``vision tower``, ``correction bias``, ``MLA kv_b_proj``.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: torch.dtype
    layer: int | None
    expert: ExpertSlot | None
    linear: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class ExpertsLayout:
    """One experts module of a live model, or one layer's experts in a checkpoint.

    Attributes:
        prefix: name of the module in a live model, ``model.layers.0.mlp.experts``.
        hub_prefix: the same on the Hub, ``model.layers.0.block_sparse_moe.experts`` for Mixtral.
        layer: decoder layer.
        num_experts: E.
        hidden: length of a row that enters an expert (the latent size where there is one).
        intermediate: I, the inner length of one expert.
        gated: has a gate projection beside up.
        transposed: 3-D tensors are ``[E, in, out]``.
        interleaved: gate and up rows alternate in the fused tensor.
        has_bias: projections have biases.
        kind: ``fused`` 3-D tensors or one tensor per expert (``modulelist``).
        gate_up_name: live parameter of gate and up together, None where they are apart or there is no gate.
        up_name: live name of the up projection where it stands alone, else None.
        down_name: live name of the down projection.
        hub_gate: projection name on the Hub, None without a gate.
        hub_up: projection name on the Hub.
        hub_down: projection name on the Hub.
    """

    prefix: str
    hub_prefix: str
    layer: int
    num_experts: int
    hidden: int
    intermediate: int
    gated: bool
    transposed: bool
    interleaved: bool
    has_bias: bool
    kind: Literal["fused", "modulelist"]
    gate_up_name: str | None
    up_name: str | None
    down_name: str
    hub_gate: str | None
    hub_up: str
    hub_down: str

    @property
    def unreadable(self) -> str:
        """Why no checkpoint of quantized experts is written, or empty."""
        return "no engine reads per-expert tensors of a family with interleaved gate and up" if self.interleaved else ""

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Projections of one expert in checkpoint order."""
        return ("gate", "up", "down") if self.gated else ("up", "down")

    def hub_weight(self, expert: int, projection: Projection) -> str:
        """Name of one expert's weight on the Hub, ``model.layers.0.mlp.experts.7.gate_proj.weight``.

        Raises:
            AnatomyError: no such expert, or no gate.
        """
        return f"{self._hub_stem(expert, projection)}.weight"

    def hub_bias(self, expert: int, projection: Projection) -> str:
        """Name of one expert's bias, spelled like its weight.

        Raises:
            AnatomyError: no such expert, or no gate.
        """
        return f"{self._hub_stem(expert, projection)}.bias"

    def matrix(self, projection: Projection) -> tuple[int, int]:
        """``(N, K)`` of one expert's projection."""
        return (self.hidden, self.intermediate) if projection == "down" else (self.intermediate, self.hidden)

    def _hub_stem(self, expert: int, projection: Projection) -> str:
        if not 0 <= expert < self.num_experts:
            raise AnatomyError(f"{self.prefix} has experts 0 to {self.num_experts - 1}; there is no expert {expert}")
        part = {"gate": self.hub_gate, "up": self.hub_up, "down": self.hub_down}[projection]
        if part is None:
            raise AnatomyError(f"{self.prefix} has no {projection} projection")
        return f"{self.hub_prefix}.{expert}.{part}"


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a source says about being quantized already.

    Attributes:
        method: ``quant_method``, or ``undeclared`` where low-precision weights have no config.
        where: the file and key that say so, or the first such tensor.
        config: the entry itself.
        stored: False where the config speaks of quantized weights and none is stored.
        block: ``weight_block_size`` of block-FP8.
    """

    method: str
    where: str
    config: Mapping[str, Any] = field(default_factory=dict)
    stored: bool = True
    block: tuple[int, int] | None = None

    @property
    def is_block_fp8(self) -> bool:
        """DeepSeek-style block-FP8, which is a source like any other."""
        return self.method == "fp8" and self.block is not None


@dataclass(frozen=True)
class Anatomy:
    """Every tensor of one model with its role, and the layout of its routed experts.

    Attributes:
        family: ``model_type`` of the layout, ``module_list`` for remote code, ``dense`` without experts.
        tensors: all tensors in the order of the source.
        experts: layouts of the decoder's experts in layer order; next-token layers are not among them.
        num_layers: decoder layers, next-token layers excluded.
        source: ``model`` or ``checkpoint``.
        quantization: set where the source holds low-precision weights or says so.
        spelling: how names are spelled, live and on the Hub.
        model_type: what the config says, also where no family of that name is known.
    """

    family: str
    tensors: tuple[TensorInfo, ...]
    experts: tuple[ExpertsLayout, ...]
    num_layers: int
    source: Literal["model", "checkpoint"]
    quantization: Quantization | None = None
    spelling: Family | None = field(default=None, repr=False)
    model_type: str = ""

    def hub_name(self, live_name: str) -> str:
        """Name on the Hub of a tensor that is no routed expert; the name itself where the two agree."""
        return hub_spelling(live_name, self.spelling)

    def layout_of(self, info: TensorInfo) -> ExpertsLayout | None:
        """Layout that a routed expert's tensor belongs to, None for other tensors and next-token layers."""
        if info.expert is None:
            return None
        head, dot, _ = info.name.rpartition(".experts.")
        return self._layouts.get(f"{head}.experts" if dot else "experts") or self._layouts.get(
            info.name.rpartition(".")[0]
        )

    def hub_weights(self, info: TensorInfo) -> tuple[str, ...]:
        """Names on the Hub of the weights that a tensor holds: one for a linear, one per expert and projection for a stack."""
        layout = self.layout_of(info)
        if layout is None or info.expert is None:
            return (self.hub_name(info.name),)
        sides: tuple[Projection, ...] = (
            ("gate", "up") if info.expert.projection == "gate_up" else (info.expert.projection,)
        )
        experts = range(layout.num_experts) if info.expert.expert is None else (info.expert.expert,)
        return tuple(layout.hub_weight(e, side) for e in experts for side in sides)

    @cached_property
    def _layouts(self) -> dict[str, ExpertsLayout]:
        return {prefix: layout for layout in self.experts for prefix in (layout.hub_prefix, layout.prefix)}
