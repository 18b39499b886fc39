"""SwapqLinear: an ``nn.Linear`` whose weight is computed with in a quantized format.

Invariant: the module's parameters keep their names; a trainable one keeps its plain master and quantizes it in each forward.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from swapq.kernels import dispatch
from swapq.kernels.routing import Routing
from swapq.nn.expert_block import FrozenExpertLinear
from swapq.nn.functional import LinearSpec, TrainableExpertLinear
from swapq.nn.gather import whole
from swapq.nn.storage import QuantizedStorage
from swapq.qtensor import QTensor, quantize

__all__ = ["SwapqLinear", "frozen_linear"]


def frozen_linear(x: Tensor, weight: QTensor, bias: Tensor | None, activations: str) -> Tensor:
    """``x [..., K]`` through a quantized weight ``[N, K]``: the forward that trainer and engine share. BF16 ``[..., N]``."""
    if dispatch.fast(x.device, weight.format, activations, weight.shape):
        from swapq.kernels import fast

        return fast.dense_linear(x, weight.parts, weight.format, bias, scope=weight.scope)
    values, scale = weight.operand()
    stack = FrozenExpertLinear(
        values[None], None if scale is None else scale[None], activations, None if bias is None else bias[None]
    )
    return _through(stack, x)


def _through(linear: FrozenExpertLinear | TrainableExpertLinear, x: Tensor) -> Tensor:
    """A linear is an expert block's linear with one expert that takes every row."""
    rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    y = linear(rows, Routing.single(rows.shape[0], x.device), gather=False)
    return y.reshape(*x.shape[:-1], y.shape[-1])


class SwapqLinear(QuantizedStorage, nn.Linear):
    """What ``swapq.convert`` makes of an ``nn.Linear``; made in place, never constructed.

    Attributes:
        spec: formats and backward mode.
        trainable: whether ``weight`` is the master ``[N, K]``; else codes and scales stand in its place.
    """

    #: name of the weight in a checkpoint
    hub_name: str
    #: the other half of an expert's gate/up pair, held in a tuple so that it is no submodule
    partner: "tuple[SwapqLinear, ...]"

    @classmethod
    def adopt(cls, module: nn.Linear, spec: LinearSpec, hub_name: str) -> "SwapqLinear":
        """Turn ``module`` into a SwapqLinear: same object, same parameters, same hooks."""
        module.__class__ = cls
        self = cast(SwapqLinear, module)
        self.spec, self.trainable, self.partner, self.hub_name = spec, True, (), hub_name
        self._init_storage()
        return self

    def pair_with(self, other: "SwapqLinear") -> None:
        """Share one FP32 scale with ``other`` (gate and up of one expert)."""
        self.partner, other.partner = (other,), (self,)

    def weight_names(self) -> tuple[str, ...]:
        return ("weight",)

    def hub_weights(self) -> list[str]:
        return [self.hub_name]

    def quantized(self) -> dict[str, QTensor]:
        """``{"weight": QTensor}`` of what a forward would use now."""
        if not self.trainable:
            return {"weight": self._stored("weight")}
        return {"weight": self._frozen_or("weight", self._quantize)}

    def _quantize(self) -> QTensor:
        w = whole(self.weight.detach()).to(torch.bfloat16)
        amax = None
        if self.partner:
            both = (w, whole(self.partner[0].weight.detach()).to(torch.bfloat16))
            amax = torch.stack([t.abs().amax().float() for t in both]).amax()
        return quantize(w, self.spec.weights, amax=amax)

    def freeze(self) -> None:
        """Replace the master by codes and scales (``trainable=False``), and the partner's: each needs the other's master."""
        if not self.trainable:
            return
        pair = (self, *self.partner)
        for linear, q in zip(pair, [linear.quantized()["weight"] for linear in pair], strict=True):
            linear._store("weight", q)
            linear._hold()

    def allocate(self) -> None:
        self._allocate("weight", self.spec.weights)
        self._hold()

    def _hold(self) -> None:
        self.trainable = False
        if self.bias is not None:
            self.bias.requires_grad_(False)

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "weight" in self.__dict__.get("stored", {}):
            return self._stored("weight")  # what asks for dtype, device or shape of a linear's weight finds them
        return super().__getattr__(name)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """``[..., K] -> [..., N]``; computed in BF16 operands, returned in the dtype of ``x``, or autocast's as from any linear."""
        if self.trains_in_bf16:
            return nn.Linear.forward(self, x)
        with torch.autocast(x.device.type, enabled=False):
            y = self._forward(x)
        device = x.device.type
        return y.to(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype)

    def _forward(self, x: Tensor) -> Tensor:
        q = self.quantized()["weight"]
        if torch.is_grad_enabled() and (self.trainable or x.requires_grad):
            q = QTensor(q.codes[None], q.scales[None], q.format, q.scope, q.axis, q.source_dtype, _stacked(q))
            bias = None if self.bias is None else self.bias[None]
            if not self.trainable:
                return _through(TrainableExpertLinear.held(q, bias, self.spec), x)
            return _through(TrainableExpertLinear(self.weight[None], bias, self.spec, q), x)
        return frozen_linear(x, q, self.bias, self.spec.activations)

    def extra_repr(self) -> str:
        state = f"backward={self.spec.backward}" if self.trainable else "codes only"
        return f"{super().extra_repr()}, {self.spec.weights}, activations={self.spec.activations}, {state}"


def _stacked(q: QTensor) -> Tensor | None:
    return None if q.global_scale is None else q.global_scale.reshape(1)
