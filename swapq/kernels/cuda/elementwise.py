"""What stands between and behind the expert linears on CUDA: SwiGLU and the weighted sum over experts, forward and backward."""

import torch
from torch import Tensor

from swapq.kernels.cuda.program import program

__all__ = ["combine", "combine_backward", "swiglu", "swiglu_backward"]

_THREADS = 256


def swiglu(rows: Tensor, table: Tensor) -> Tensor:
    """``bf16(table[gate]) * up`` of BF16 rows ``[R, 2I]``: BF16 ``[R, I]``. ``table`` BF16 ``[65536]``, indexed by bits + 32768."""
    count, inner = rows.shape[0], rows.shape[1] // 2
    out = torch.empty(count, inner, dtype=torch.bfloat16, device=rows.device)
    kernel = program("swiglu", rows.device, I=inner, BACKWARD=0, THREADS=_THREADS)
    kernel.launch((-(-count * inner // 2 // _THREADS),), _THREADS, rows, table, None, None, count, out)
    return out


def swiglu_backward(rows: Tensor, table: Tensor, slopes: Tensor, dh: Tensor) -> Tensor:
    """Gradient of :func:`swiglu` for ``rows``: BF16 ``[R, 2I]``. ``slopes`` float32 ``[65536]``: the activation's derivative."""
    count, inner = dh.shape
    out = torch.empty_like(rows)
    kernel = program("swiglu", rows.device, I=inner, BACKWARD=1, THREADS=_THREADS)
    kernel.launch((-(-count * inner // 2 // _THREADS),), _THREADS, rows, table, slopes, dh, count, out)
    return out


def combine(
    rows: Tensor,
    weights: Tensor | None,
    top_k: int,
    *,
    position: Tensor | None = None,
    ids: Tensor | None = None,
    experts: int = 0,
    local_of: Tensor | None = None,
) -> Tensor:
    """BF16 ``[T, H]``: the float32 sum over a token's slots in ascending order.

    Args:
        rows: BF16 ``[..., H]``, in slot order, or in the order that ``position`` gives.
        weights: float32 ``[T, k]``; None for 1.
        position: int32 ``[T * k]``, row of each slot, -1 where it is not here.
        ids: int32 or int64 ``[T, k]``, where rows are in slot order; with ``experts`` and ``local_of`` as in ``route``.
    """
    tokens = (position.numel() // top_k) if position is not None else (0 if ids is None else ids.shape[0])
    hidden = rows.shape[-1]
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=rows.device)
    kernel = program("combine", rows.device, H=hidden, THREADS=_THREADS)
    wide = int(ids is not None and ids.dtype == torch.int64)
    known = 0 if local_of is None else local_of.numel()
    kernel.launch(
        (tokens,), _THREADS, rows, weights, position, ids, wide, local_of, known, experts, top_k, out, overlap=True
    )
    return out


def combine_backward(rows: Tensor, weights: Tensor, slots: Tensor, top_k: int, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`combine` for ``rows [R, H]`` (BF16) and ``weights [T, k]`` (float32); ``slots`` int64 ``[R]``."""
    d_rows, d_weights = torch.empty_like(rows), torch.zeros_like(weights)
    kernel = program("combine_backward", rows.device, H=rows.shape[1], THREADS=_THREADS)
    kernel.launch((rows.shape[0],), _THREADS, rows, weights, slots, top_k, d_out, d_rows, d_weights)
    return d_rows, d_weights
