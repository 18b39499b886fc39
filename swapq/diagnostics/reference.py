"""Reference KL: how far the trained policy has moved from a BF16 model. A figure to look at, never a penalty.

It tells learning from drift: a quantized policy starts at the KL that quantization costs, and moves on from there.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from swapq.diagnostics.mismatch import MismatchSums

__all__ = ["ReferenceKL", "completion_logps", "reference_kl"]


class ReferenceKL(NamedTuple):
    """Estimates of KL(policy || reference) in nats per token, over tokens that the policy sampled."""

    k1: float
    """Mean of `policy - reference`: unbiased, may be negative."""
    k3: float
    """Mean of `r - 1 - log r` with `r = p_reference / p_policy`: never negative."""

    @classmethod
    def of(cls, sums: MismatchSums) -> "ReferenceKL":
        """The figures of sums over `(reference, policy)`, in this order, of one process or of several."""
        figures = sums.result()
        return cls(figures.k1, figures.k3)

    def to_dict(self, prefix: str = "") -> dict[str, float]:
        """The figures under their names, each with `prefix` before it."""
        return {f"{prefix}k1": self.k1, f"{prefix}k3": self.k3}


def reference_kl(policy_logps: Tensor, reference_logps: Tensor, mask: Tensor | None = None) -> ReferenceKL:
    """The figures of one batch; all tensors have the shape (sequences, tokens), `mask` marks the tokens that count."""
    if mask is None:
        mask = torch.ones_like(policy_logps, dtype=torch.bool)
    return ReferenceKL.of(MismatchSums.of(reference_logps, policy_logps, mask))


def completion_logps(
    model: Any, ids: Tensor, attention_mask: Tensor, keep: int, *, temperature: float = 1.0, batch_size: int = 8
) -> Tensor:
    """Log-probabilities of the last `keep` of the tokens `ids` (sequences, tokens) under a causal LM, without gradients.

    Positions count the tokens that `attention_mask` marks, so padding on the left moves nothing.
    """
    found = []
    positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        for start in range(0, ids.shape[0], batch_size):
            rows = slice(start, start + batch_size)
            logits = model(
                input_ids=ids[rows],
                attention_mask=attention_mask[rows],
                position_ids=positions[rows],
                logits_to_keep=keep + 1,
            ).logits
            scaled = logits[:, :-1].float() / temperature
            found.append(scaled.log_softmax(-1).gather(-1, ids[rows, -keep:, None]).squeeze(-1))
    return torch.cat(found)
