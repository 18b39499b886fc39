"""QTensor: the codes and scales of one quantized tensor (or of a stack of experts), and what they are.

It is what compute, serialization and sync exchange. It is never a trainable Parameter: masters are (design decision 1).
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchao.utils import TorchAOBaseTensor

from swapq import formats
from swapq.errors import FormatError
from swapq.formats import Format, Operand, Parts
from swapq.kernels import dispatch
from swapq.kernels.refused import any_refused

__all__ = ["QTensor", "finite_flags", "is_finite", "quantize", "require_finite"]


class QTensor(TorchAOBaseTensor):
    """A quantized tensor of logical shape ``shape`` and dtype ``dtype`` (the dtype it was quantized from).

    Attributes:
        codes: elements (MXFP8, FP8 block: float8_e4m3fn; NVFP4: uint8, two codes a byte, even element low; INT4: int8, one code each).
        scales: block scales, linear layout (MXFP8: uint8 E8M0; NVFP4: float8_e4m3fn; FP8 block: float32; INT4: bfloat16).
        global_scale: NVFP4's float32 decode scale(s), else None.
        format, scope, axis: what the bits mean, over what the FP32 scale reaches, and the block axis (-1 or -2).
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None
    format: str
    scope: str
    axis: int

    tensor_data_names: ClassVar[list[str]] = ["codes", "scales"]
    tensor_attribute_names: ClassVar[list[str]] = ["format", "scope", "axis", "source_dtype"]
    optional_tensor_data_names: ClassVar[list[str]] = ["global_scale"]

    def __new__(
        cls,
        codes: Tensor,
        scales: Tensor,
        format: str,
        scope: str,
        axis: int = -1,
        source_dtype: torch.dtype = torch.bfloat16,
        global_scale: Tensor | None = None,
    ) -> "QTensor":
        shape = formats.get(format).logical_shape(codes)
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=source_dtype, device=codes.device)
        self.codes, self.scales, self.global_scale = codes, scales, global_scale
        self.format, self.scope, self.axis, self.source_dtype = format, scope, axis, source_dtype
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @property
    def spec(self) -> Format:
        """The format object."""
        return formats.get(self.format)

    @property
    def parts(self) -> Parts:
        return Parts(self.codes, self.scales, self.global_scale)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The value of every element in the contract's float32 order, rounded to ``dtype`` (default: the dtype it came from)."""
        dtype = dtype or self.source_dtype
        if dtype == torch.bfloat16:
            values = dispatch.dequantize(self.parts, self.format, self.scope, self.axis)
            if values is not None:
                return values
        return self.spec.dequantize(self.parts, scope=self.scope, axis=self.axis).to(dtype)

    def operand(self) -> Operand:
        """Exact BF16 values and the FP32 scale applied after the sum (contract section 3)."""
        return self.spec.operand(self.parts, scope=self.scope, axis=self.axis)

    def named_parts(self) -> dict[str, Tensor]:
        """``{"codes": ..., "scales": ..., "global_scale": ...}`` without what is None."""
        return {k: v for k, v in self.parts._asdict().items() if v is not None}

    def stored_parts(self) -> dict[str, Tensor]:
        """:meth:`named_parts` as they lie in files and on the wire (INT4: two codes a byte)."""
        return {k: v for k, v in dispatch.stored(self.parts, self.format)._asdict().items() if v is not None}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        parts = {k: v.view(torch.uint8) if v.dtype == torch.float8_e4m3fn else v for k, v in self.named_parts().items()}
        return _rebuilt, (parts, self.format, self.scope, self.axis, self.source_dtype)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        extra = "" if self.global_scale is None else f", global_scale {tuple(self.global_scale.shape)}"
        return (
            f"QTensor({self.format}, shape={tuple(self.shape)}, scope={self.scope!r}, axis={self.axis}, dtype={self.dtype}, "
            f"codes {tuple(self.codes.shape)} {self.codes.dtype}, scales {tuple(self.scales.shape)} {self.scales.dtype}{extra}, "
            f"device={self.codes.device})"
        )


def _rebuilt(parts: dict[str, Tensor], fmt: str, scope: str, axis: int, dtype: torch.dtype) -> QTensor:
    """A pickled QTensor. Its parts travel as bytes, since plain pickle knows no float8."""
    float8 = [k for k, dtype in formats.get(fmt).dtypes.items() if dtype == torch.float8_e4m3fn]
    codes, scales = (parts[k].view(torch.float8_e4m3fn) if k in float8 else parts[k] for k in ("codes", "scales"))
    return QTensor(codes, scales, fmt, scope, axis, dtype, parts.get("global_scale"))


torch.serialization.add_safe_globals([_rebuilt])


@QTensor.implements([torch.ops.aten._to_copy.default])
def _to_copy(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QTensor:
    """Another device moves the bytes; another dtype is the one that ``dequantize`` gives. Codes and scales are never cast."""
    q, dtype = args[0], kwargs.get("dtype")
    dtype = q.source_dtype if dtype is None else dtype
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise FormatError(f"a QTensor stands for real numbers; {dtype} is refused, write q.dequantize({dtype}) instead")
    device, non_blocking = kwargs.get("device") or q.device, kwargs.get("non_blocking", False)
    moved = {k: v.to(device, non_blocking=non_blocking, copy=True) for k, v in q.named_parts().items()}
    return QTensor(moved["codes"], moved["scales"], q.format, q.scope, q.axis, dtype, moved.get("global_scale"))


@QTensor.implements([torch.ops.aten.copy_.default])
def _copy(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QTensor:
    """Copy another QTensor's bytes, or quantize a plain tensor with fresh scales: the old scale is never reused."""
    into, source = args[0], args[1]
    if not isinstance(into, QTensor):
        raise FormatError("copy_ from a QTensor into a plain tensor is refused; write q.dequantize(dtype) first")
    if not isinstance(source, QTensor):
        source = quantize(source.to(into.source_dtype), into.format, scope=into.scope, axis=into.axis)
    mine, theirs = into.named_parts(), source.named_parts()
    if (into.format, into.scope, into.axis, into.shape) != (source.format, source.scope, source.axis, source.shape):
        raise FormatError(f"copy_ between different tensors is refused: {into!r} from {source!r}")
    for name, tensor in mine.items():
        tensor.copy_(theirs[name])
    return into


def quantize(
    x: Tensor,
    fmt: str,
    *,
    scope: str | None = None,
    axis: int = -1,
    amax: Tensor | None = None,
    block: int | None = None,
) -> QTensor:
    """Quantize ``x`` in the dtype it has (contract sections 1, 2 and 7; casting a master to BF16 first is the caller's part).

    Args:
        x: ``[..., M, K]``, BF16, FP16 or FP32, any strides. Leading dimensions are experts: one FP32 scale each.
        fmt: ``"mxfp8"``, ``"nvfp4"``, ``"fp8_block"`` or ``"int4"``.
        scope: ``nvfp4``: ``"tensor"`` (default), ``"row"`` or ``"tile"``; ``fp8_block``: ``"tile"`` (default) or ``"row"``. The others have
            no scope to choose.
        axis: block axis. -2 quantizes column-wise (``mxfp8``, ``fp8_block`` by rows).
        amax: float32, a shared scope amax (a gate/up pair): shape of the leading dimensions, or of the rows in row scope. One
            number serves every scope.
        block: group size of ``int4``: 128 (default) or 32. In groups of 32 the format is called ``int4_g32``.

    Raises:
        FormatError: see :meth:`swapq.formats.Format.check`; an ``amax`` of another shape.
    """
    form = formats.with_block(fmt, block)
    fmt = form.name
    if not isinstance(x, Tensor):
        raise FormatError(f"{fmt}: expected a torch.Tensor, got {type(x).__name__}")
    scope = form.default_scope if scope is None else scope
    if isinstance(x, QTensor):
        raise FormatError(f"{fmt}: the tensor is quantized already ({x.format}); quantize the high-precision tensor")
    if amax is not None and not form.shares_scale:
        raise FormatError(f"{fmt}: `amax` is given, but only nvfp4 has a scale that tensors can share; leave it out")
    form.check(x, scope=scope, axis=axis)
    if amax is not None:
        amax = _scope_amax(amax, form.part_shapes(tuple(x.shape), scope=scope, axis=axis)["global_scale"], x, fmt)
    with torch.no_grad():
        parts = dispatch.quantize(x.detach(), fmt, scope, axis, amax)
        if parts is None:
            parts = form.quantize(x.detach(), scope=scope, axis=axis, amax=amax)
    return QTensor(parts.codes, parts.scales, fmt, scope, axis, x.dtype, parts.global_scale)


def _scope_amax(amax: Tensor, shape: tuple[int, ...], x: Tensor, fmt: str) -> Tensor:
    """``amax`` with one number per scope. A tensor of another shape would broadcast into a tensor that is not ``x``."""
    amax = torch.as_tensor(amax, dtype=torch.float32, device=x.device).detach()
    if amax.dim() and tuple(amax.shape) != shape:
        raise FormatError(
            f"{fmt}: `amax` has shape {tuple(amax.shape)}, but a tensor of shape {tuple(x.shape)} has scopes of shape {shape}; give "
            "one number per scope, or one for all"
        )
    return amax.expand(shape)


def require_finite(x: Tensor, name: str) -> None:
    """Refuse a weight that is NaN or Inf in BF16, the dtype in which weights are quantized (contract section 0).

    Raises:
        FormatError: naming the tensor, the count and the first index.
    """
    if bool(is_finite(x)):
        return
    bad = ~torch.isfinite(x.to(torch.bfloat16))
    first = tuple(int(i) for i in bad.nonzero()[0])
    raise FormatError(
        f"{name}: {int(bad.sum())} of {x.numel()} values are not finite in BF16, the first at index {first} ({x[first].item()}); "
        "repair the weight (a diverged run or a damaged file) before quantizing it"
    )


#: dtype of a weight -> how kernels call what is refused in it
_WEIGHTS = {torch.bfloat16: "bf16", torch.float32: "float32"}


def finite_flags(tensors: Iterable[Tensor]) -> list[Tensor]:
    """0-dim bools where the tensors lie: whether they are finite in BF16, one for each tensor or for many. Nothing waits."""
    shared: dict[torch.device, list[Tensor]] = {}
    flags: list[Tensor] = []
    for x in tensors:
        by_kernel = x.dtype in _WEIGHTS and dispatch.kernels(x.device)
        if by_kernel and x.is_contiguous() and x.data_ptr() % 16 == 0:  # else copies would all be held until the launch
            shared.setdefault(x.device, []).append(x)
        else:
            flags.append(is_finite(x))
    for group in shared.values():
        flags.append(~any_refused(group, [_WEIGHTS[x.dtype] for x in group]).any())
    return flags


def is_finite(x: Tensor) -> Tensor:
    """0-dim bool on the device of ``x``: whether all of it is finite in BF16. Nothing waits.

    One pass without a temporary of its size: NaN, Inf and a float32 too large for BF16 show in the extremes.
    """
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    pieces = x if x.dim() > 2 and x.numel() >= 1 << 31 else (x,)  # torch reduces fewer elements than that to a pair
    ends = torch.stack([end for piece in pieces for end in torch.aminmax(piece)])
    return torch.isfinite(ends.to(torch.bfloat16)).all()
