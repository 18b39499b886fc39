"""Gate: what stands between the two expert linears. SwiGLU in the contract's two roundings (section 4), any activation alike.

An activation of BF16 values is a function of 16 bits, so it is looked up in a table made once in float32. The same bits come out
on every device, at every position: vectorized CPU code and its scalar tails, or a CPU and a GPU, need not agree on ``exp``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import ACT2FN

from swapq.errors import UnsupportedError
from swapq.kernels import dispatch

__all__ = ["Gate", "activation", "activation_table"]

Act = Callable[[Tensor], Tensor]


def _every_bf16() -> Tensor:
    """float32 value of every BF16 number, at its bits (as a signed number) plus 32768."""
    return torch.arange(-32768, 32768, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16).float()


@lru_cache(maxsize=64)
def _table(act: "_Act", device: torch.device) -> Tensor:
    """``bf16(act(f32(v)))`` for every BF16 ``v``, indexed by its bits plus 32768."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        return act.function(_every_bf16()).to(torch.bfloat16).to(device)


@lru_cache(maxsize=64)
def _slopes(act: "_Act", device: torch.device) -> Tensor:
    """float32 derivative of the activation at every BF16 number, indexed as :func:`_table`."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        x = _every_bf16().requires_grad_()
        (slopes,) = torch.autograd.grad(act.function(x).sum(), x)
    return slopes.to(device)


@dataclass(frozen=True, slots=True)
class _Act:
    """An activation that compares by what it computes, so that the layers of a model share one table."""

    key: Any
    function: Act = field(compare=False)

    @classmethod
    def of(cls, act: "str | Act") -> "_Act":
        if isinstance(act, str):
            return cls(act, ACT2FN[act])
        if isinstance(act, nn.Module):
            if any(True for _ in act.parameters()):
                raise UnsupportedError(f"activation {act!r} has parameters; swapq knows activations without any")
            options = tuple(
                sorted((k, repr(v)) for k, v in vars(act).items() if not k.startswith("_") and k != "training")
            )
            return cls((type(act), options), act)
        return cls(act, act)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, act: _Act) -> Tensor:
        ctx.save_for_backward(x)
        ctx.act = act
        return _table(act, x.device)[x.contiguous().view(torch.int16).to(torch.int32) + 32768]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
            x = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(ctx.act.function(x), x, dy)
        return dx, None


class _SwiGLU(torch.autograd.Function):
    """``activation(gate) * up`` in one kernel each way, saving the rows alone."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, act: _Act) -> Tensor:
        from swapq.kernels.cuda import elementwise

        ctx.save_for_backward(rows)
        ctx.act = act
        return elementwise.swiglu(rows.contiguous(), _table(act, rows.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, None]:
        from swapq.kernels.cuda import elementwise

        (rows,) = ctx.saved_tensors
        dh = dh.to(torch.bfloat16).contiguous()
        table, slopes = _table(ctx.act, rows.device), _slopes(ctx.act, rows.device)
        return elementwise.swiglu_backward(rows.contiguous(), table, slopes, dh), None


def activation_table(act: "str | Act", device: torch.device) -> Tensor:
    """BF16 ``[65536]``: the activation of every BF16 number, indexed by its bits (as a signed number) plus 32768."""
    return _table(_Act.of(act), device)


def activation(x: Tensor, act: "str | Act") -> Tensor:
    """``bf16(act(f32(x)))`` of BF16 ``x``, any shape. The gradient is autograd's of the activation in BF16."""
    return _Activation.apply(x, _Act.of(act))


class Gate:
    """``h = bf16(act(gate)) * up``, or ``bf16(act(up))`` for experts without a gate.

    Args:
        act: name of the activation in transformers' table (``"silu"``), or an elementwise function without parameters.
        gated: whether rows hold gate and up halves.
        function: a family's own gate (``_apply_gate``); called instead of all this, on BF16 rows ``[R, N]``.

    Raises:
        UnsupportedError: an unknown activation.
    """

    def __init__(
        self, act: "str | Act" = "silu", *, gated: bool = True, function: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        if function is None and isinstance(act, str) and act not in ACT2FN:
            raise UnsupportedError(f"activation {act!r} is not known; use one of transformers' activations")
        self.act, self.gated, self.function = act, gated, function

    def __call__(self, rows: Tensor) -> Tensor:
        """``[R, 2I] -> [R, I]`` (gated) or ``[R, I] -> [R, I]``, BF16."""
        if self.function is not None:
            return self.function(rows).to(torch.bfloat16)
        if not self.gated:
            return activation(rows, self.act)
        if (
            dispatch.kernels(rows.device)
            and rows.dtype == torch.bfloat16
            and rows.dim() == 2
            and rows.shape[1] % 4 == 0
        ):
            return _SwiGLU.apply(rows, _Act.of(self.act))
        gate, up = rows.chunk(2, dim=-1)
        return activation(gate, self.act) * up

    def __repr__(self) -> str:
        return f"Gate({'own' if self.function else self.act}, gated={self.gated})"
