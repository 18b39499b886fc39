"""Spikes of the gradient norm: a step whose norm is several times the recent median.

A median, not a mean: one spike must not hide the next.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["Spike", "SpikeMeter", "find_spikes"]


class Spike(NamedTuple):
    """One step whose norm stood out."""

    step: int
    norm: float
    ratio: float
    """The norm over the median of the steps before; infinite for a norm that is not finite."""


class SpikeMeter:
    """Compares each norm with the median of those before it.

    Args:
        window: steps that the median is taken over.
        factor: ratio from which a norm counts as a spike.
        warmup: steps without a verdict, at the start.
    """

    def __init__(self, window: int = 50, factor: float = 5.0, warmup: int = 5) -> None:
        self.factor, self.warmup = factor, warmup
        self._recent: deque[float] = deque(maxlen=window)

    def ratio(self, norm: float) -> float | None:
        """The norm over the recent median, None while too few steps were seen. Non-finite norms are infinite and not remembered."""
        recent = list(self._recent)
        if math.isfinite(norm):
            self._recent.append(norm)
        if len(recent) < self.warmup:
            return None
        median = statistics.median(recent)
        if not math.isfinite(norm):
            return math.inf
        return norm / median if median > 0 else (math.inf if norm > 0 else 1.0)

    def is_spike(self, ratio: float | None) -> bool:
        """Whether a ratio is that of a spike."""
        return ratio is not None and ratio >= self.factor


def find_spikes(
    history: Iterable[Mapping[str, Any]], *, window: int = 50, factor: float = 5.0, warmup: int = 5
) -> list[Spike]:
    """Spikes in the rows of a run's log (``trainer.state.log_history``): those with ``step`` and ``grad_norm``."""
    meter, found = SpikeMeter(window, factor, warmup), []
    for row in history:
        if "step" not in row or not isinstance(row.get("grad_norm"), int | float):
            continue
        norm = float(row["grad_norm"])
        ratio = meter.ratio(norm)
        if ratio is not None and meter.is_spike(ratio):
            found.append(Spike(int(row["step"]), norm, ratio))
    return found
