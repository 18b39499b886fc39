"""How far the rollout engine's log-probabilities are from the trainer's, and what that does to importance sampling.

Everything is computed from the raw log-ratio `trainer - rollout` of the sampled tokens, before any clipping or masking,
and from sums and maxima only, so that the figures of several processes add up to those of one.
"""

import dataclasses
import math
from collections.abc import Callable

import torch

from swapq.errors import SwapqError

__all__ = ["Mismatch", "MismatchSums", "measure_mismatch"]

Reduction = Callable[[torch.Tensor], torch.Tensor]

# TRL's modes: one ratio per token or one per sequence; too large ratios are cut down or set to zero
_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclasses.dataclass(frozen=True, slots=True)
class Mismatch:
    """The figures of one batch of rollouts. `k1` and `k3` estimate KL(rollout || trainer) in nats per token."""

    abs_mean: float
    """Mean absolute difference of the log-probabilities."""
    abs_max: float
    """Largest absolute difference of the log-probabilities."""
    k1: float
    """Mean of `rollout - trainer`: unbiased, may be negative."""
    k3: float
    """Mean of `r - 1 - log r` with `r = p_trainer / p_rollout`: never negative."""
    ess: float
    """Effective sample size of the importance weights, as a fraction of their number: 1 when all weights are equal."""
    masked_fraction: float
    """Fraction of tokens whose importance weight the correction cuts down or sets to zero."""
    tokens: int
    """Number of tokens the figures are taken over; those without a rollout log-probability are left out."""

    def to_dict(self, prefix: str = "") -> dict[str, float]:
        """The figures under their names, each with `prefix` before it; the token count is left out."""
        names = ("abs_mean", "abs_max", "k1", "k3", "ess", "masked_fraction")
        return {prefix + name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True, slots=True)
class MismatchSums:
    """Sums over one process's tokens: add those of several processes with `reduced`, then ask for `result()`."""

    sums: torch.Tensor
    """float64: tokens, |d|, k1, k3, masked tokens, number of weights, sum of weights, sum of squared weights."""
    maximum: torch.Tensor
    """float64 of shape []: the largest |d|."""

    def reduced(self, total: "Reduction", largest: "Reduction") -> "MismatchSums":
        """The sums over all processes, given a sum-reduction and a max-reduction."""
        return MismatchSums(total(self.sums), largest(self.maximum))

    def result(self) -> Mismatch:
        """The figures. Without a single token they are all zero and the effective sample size is one."""
        tokens, abs_sum, k1, k3, masked, weights, weight_sum, square_sum = self.sums.tolist()
        if tokens == 0:
            return Mismatch(0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0)
        ess = weight_sum * weight_sum / (weights * square_sum) if square_sum > 0 and math.isfinite(square_sum) else 0.0
        return Mismatch(
            abs_mean=abs_sum / tokens,
            abs_max=self.maximum.item(),
            k1=k1 / tokens,
            k3=k3 / tokens,
            ess=ess,
            masked_fraction=masked / tokens,
            tokens=int(tokens),
        )

    @classmethod
    def of(
        cls,
        trainer_logps: torch.Tensor,
        rollout_logps: torch.Tensor,
        mask: torch.Tensor,
        *,
        mode: str = "token_truncate",
        clip_min: float | None = None,
        clip_max: float | None = None,
    ) -> "MismatchSums":
        """Sums over the tokens that `mask` marks. The arguments are those of `measure_mismatch`."""
        if mode not in _MODES:
            raise SwapqError(f"importance-sampling mode: got {mode!r}; expected one of {', '.join(_MODES)}")
        if not trainer_logps.shape == rollout_logps.shape == mask.shape or trainer_logps.dim() != 2:
            raise SwapqError(
                "mismatch: trainer_logps, rollout_logps and mask must have one shape (sequences, tokens); got "
                f"{tuple(trainer_logps.shape)}, {tuple(rollout_logps.shape)} and {tuple(mask.shape)}"
            )
        difference = trainer_logps.detach().double() - rollout_logps.detach().double()
        # an engine reports NaN where it has no log-probability for a token: no statement can be made about it
        valid = mask.bool() & ~torch.isnan(difference)
        difference = torch.where(valid, difference, torch.zeros_like(difference))
        per_token_BT = valid.double()
        ratio = torch.exp(difference)
        if mode.startswith("sequence"):
            weights = torch.exp(difference.sum(dim=-1, keepdim=True))
            counted = valid.any(dim=-1, keepdim=True)
        else:
            weights, counted = ratio, valid
        outside = torch.zeros_like(weights, dtype=torch.bool)
        if clip_max is not None:
            outside |= weights > clip_max
        if clip_min is not None:
            outside |= weights < clip_min
        weights = torch.where(counted, weights, torch.zeros_like(weights))
        absolute = difference.abs()
        sums = torch.stack(
            [
                per_token_BT.sum(),
                absolute.sum(),
                -difference.sum(),
                torch.where(valid, ratio - 1 - difference, torch.zeros_like(ratio)).sum(),
                (outside & valid).double().sum(),
                counted.double().sum(),
                weights.sum(),
                weights.square().sum(),
            ]
        )
        return cls(sums, absolute.max() if absolute.numel() else sums.new_zeros(()))


def measure_mismatch(
    trainer_logps: torch.Tensor,
    rollout_logps: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    mode: str = "token_truncate",
    clip_min: float | None = None,
    clip_max: float | None = None,
) -> Mismatch:
    """Compare the trainer's log-probabilities of sampled tokens with those the rollout engine sampled them with.

    ```python
    figures = measure_mismatch(trainer_logps, rollout_logps, completion_mask, clip_max=3.0)
    print(figures.abs_mean, figures.k3, figures.ess)
    ```

    All three tensors have the shape (sequences, tokens); `mask` marks the tokens that count. `mode`, `clip_min` and
    `clip_max` are those of TRL's importance-sampling correction: in a `sequence_*` mode the weight of a sequence is the
    exponential of its *summed* difference, so a long sequence may be masked for a small difference per token.
    """
    if mask is None:
        mask = torch.ones_like(trainer_logps, dtype=torch.bool)
    return MismatchSums.of(trainer_logps, rollout_logps, mask, mode=mode, clip_min=clip_min, clip_max=clip_max).result()
