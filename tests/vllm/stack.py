"""Stacks built by hand from a checkpoint's tensors, without the sending code."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["stack", "stacked"]


def stacked(weights: dict[str, Tensor], llm: Any) -> dict[str, Tensor]:
    """A checkpoint's tensors as an engine takes them at once."""
    from swapq_vllm.receiver import stacked_experts

    return stack(weights, stacked_experts(llm))


def stack(weights: dict[str, Tensor], prefixes: frozenset[str]) -> dict[str, Tensor]:
    """A checkpoint's tensors with experts put together by hand, as a sender of stacks names and lays them out."""
    found: dict[str, list[tuple[int, str, Tensor]]] = {}
    out: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        prefix, number, projection, suffix = ([*name.rsplit(".", 3), *[""] * 4])[:4]
        if prefix in prefixes:
            side = "down_proj" if projection == "down_proj" else "gate_up_proj"
            found.setdefault(f"{prefix}.{side}.{suffix}", []).append((int(number), projection, tensor))
        else:
            out[name] = tensor
    for name, parts in found.items():
        experts = [
            [t for e, p, t in sorted(parts, key=lambda part: (part[0], part[1] == "up_proj")) if e == number]
            for number in sorted({e for e, _, _ in parts})
        ]
        scalar = experts[0][0].dim() == 0
        joined = [torch.stack(ts) if scalar else torch.cat(ts) for ts in experts]
        whole = torch.stack(joined)
        out[name] = whole.squeeze(1) if scalar and len(experts[0]) == 1 else whole
    return out
