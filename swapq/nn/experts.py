"""SwapqExperts: a transformers experts module that computes in a quantized format.

Invariant: parameters keep their names and layout; forward keeps the signature ``(hidden_states, top_k_index, top_k_weights)`` and calls
the expert block that the rollout engine calls.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from swapq.anatomy import ExpertsLayout
from swapq.errors import UnsupportedError
from swapq.kernels import dispatch
from swapq.nn.expert_block import ExpertLinear, FrozenExpertLinear, StoredExpertLinear, expert_block
from swapq.nn.functional import LinearSpec, TrainableExpertLinear, quantize_weight
from swapq.nn.gate import Gate
from swapq.nn.gather import whole
from swapq.nn.storage import QuantizedStorage
from swapq.qtensor import QTensor

__all__ = ["SwapqExperts"]


_SCOPES = {"nvfp4": "one scale per token", "nvfp4_tile": "one scale for all tokens", "bf16": "as they are"}


class SwapqExperts(QuantizedStorage):
    """What ``swapq.convert`` makes of an experts module; made in place, never constructed.

    Attributes:
        swapq_layout: names, shapes and order of the fused parameters.
        spec: formats and backward mode of both linears.
        plain: the class that the module had. Training in BF16 beside a quantized rollout runs its forward.
        expert_tp: slices of the inner length with row scales of their own.
    """

    swapq_layout: ExpertsLayout
    plain: type[nn.Module]
    expert_tp: int
    family_gate: Callable[[nn.Module, Tensor], Tensor] | None

    @classmethod
    def adopt(cls, module: nn.Module, layout: ExpertsLayout, spec: LinearSpec, *, expert_tp: int = 1) -> "SwapqExperts":
        """Turn ``module`` into a SwapqExperts: same object, same parameters, same hooks.

        Raises:
            UnsupportedError: a gate or an activation that is not known how to compute.
        """
        family_gate = _own_gate(module)
        if family_gate is None and not callable(getattr(module, "act_fn", None)):
            raise UnsupportedError(
                f"{layout.prefix}: {type(module).__name__} has neither `_apply_gate` nor `act_fn`; its gate is not known"
            )
        if layout.interleaved and family_gate is None:
            raise UnsupportedError(
                f"{layout.prefix}: gate and up are interleaved, but {type(module).__name__} has no gate of its own"
            )
        plain = type(module)
        module.__class__ = cls
        self = cast(SwapqExperts, module)
        self.plain = plain
        self.swapq_layout, self.family_gate, self.trainable = layout, family_gate, True
        self.spec, self.expert_tp = replace(spec, transposed=layout.transposed), expert_tp
        self._init_storage()
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # a method that the plain forward calls
            found = getattr(self.__dict__.get("plain"), name, None)
            if found is None:
                raise
            return found.__get__(self, type(self)) if hasattr(found, "__get__") else found

    @property
    def up_name(self) -> str:
        """Parameter of the first linear: fused gate and up, or up alone."""
        return self.swapq_layout.gate_up_name or self.swapq_layout.up_name or ""

    @property
    def down_name(self) -> str:
        return self.swapq_layout.down_name

    def weight_names(self) -> tuple[str, ...]:
        return (self.up_name, self.down_name)

    def hub_weights(self) -> list[str]:
        layout = self.swapq_layout
        return [layout.hub_weight(e, p) for e in range(layout.num_experts) for p in layout.projections]

    def quantized(self) -> dict[str, QTensor]:
        """Parameter name -> QTensor ``[E, N, K]`` of what a forward would use now."""
        return {name: self.current(name) for name in self.weight_names()}

    def current(self, name: str) -> QTensor:
        if not self.trainable:
            return self._stored(name)
        return self._frozen_or(name, lambda: self._quantize(name))

    def _quantize(self, name: str) -> QTensor:
        master, spec = whole(getattr(self, name)), self.spec
        return quantize_weight(master, spec.weights, transposed=spec.transposed, stacked=self._stacked(name))

    def _stacked(self, name: str) -> int:
        """Matrices above each other in one expert's rows: gate and up, except where a family interleaves them."""
        layout = self.swapq_layout
        return 2 if name == self.up_name and layout.gated and not layout.interleaved else 1

    def freeze(self) -> None:
        """Replace the masters by codes and scales (``trainable=False``)."""
        for name, q in self.quantized().items():
            self._store(name, q)
        self.trainable = False
        self.requires_grad_(False)

    def allocate(self) -> None:
        for name in self.weight_names():
            self._allocate(name, self.spec.weights, transposed=self.spec.transposed, stacked=self._stacked(name))
        self.trainable = False
        self.requires_grad_(False)

    def _gate(self) -> Gate:
        if self.family_gate is not None:
            family_gate = self.family_gate
            return Gate(function=lambda rows: family_gate(self, rows))
        return Gate(cast(nn.Module, self.act_fn), gated=self.swapq_layout.gated)

    def _linear(self, name: str, slices: int, rows_learn: bool = True) -> ExpertLinear:
        bias = getattr(self, f"{name}_bias", None)
        q = self.current(name)
        if torch.is_grad_enabled() and (self.trainable or rows_learn):
            spec = replace(self.spec, slices=slices)
            if not self.trainable:
                return TrainableExpertLinear.held(q, bias, spec)
            return TrainableExpertLinear(getattr(self, name), bias, spec, q)
        if dispatch.fast(q.codes.device, self.spec.weights, self.spec.activations, q.shape, slices):
            return StoredExpertLinear(q, bias)
        values, scale = q.operand()
        return FrozenExpertLinear(values, scale, self.spec.activations, bias, slices=slices)

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[T, H]``, integer ``[T, k]``, ``[T, k]`` -> ``[T, H]`` in the dtype of ``hidden_states``."""
        if self.trains_in_bf16:
            return self.plain.forward(self, hidden_states, top_k_index, top_k_weights)
        rows_learn = hidden_states.requires_grad
        with torch.autocast(hidden_states.device.type, enabled=False):
            out = expert_block(
                hidden_states,
                top_k_index,
                top_k_weights,
                self._linear(self.up_name, 1, rows_learn),
                self._linear(self.down_name, self.expert_tp, rows_learn),
                num_experts=self.swapq_layout.num_experts,
                gate=self._gate(),
            )
        return out.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        layout, state = self.swapq_layout, f"backward={self.spec.backward}" if self.trainable else "codes only"
        scope = _SCOPES.get(self.spec.activations, "blocks")
        return (
            f"experts={layout.num_experts}, hidden={layout.hidden}, intermediate={layout.intermediate}, {self.spec.weights}, "
            f"activations={self.spec.activations} ({scope}), {state}"
        )


def _own_gate(module: nn.Module) -> Callable[[nn.Module, Tensor], Tensor] | None:
    """A family's own gate; None for the common ``act_fn(gate) * up``."""
    gate = getattr(type(module), "_apply_gate", None)
    return None if gate is None or gate.__name__ == "_default_apply_gate" else gate
