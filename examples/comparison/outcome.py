"""The outcome of a comparison as lines of text: enough to read it where there is no browser."""

import statistics
from collections.abc import Sequence
from typing import Any

from comparison.summary import groups, sharing_note

__all__ = ["outcome"]

_EDGE = 5
"""Steps of `first` and `last`."""
_HEAD = (
    "",
    "seeds",
    f"exact, first {_EDGE}",
    f"last {_EDGE}",
    "|d log p|",
    "reference KL",
    "grad norm",
    "rollout s",
    "sync s",
    "train s",
    "step s",
    "peak MiB",
)


def outcome(runs: Sequence[dict[str, Any]]) -> str:
    """One line a configuration, over all seeds: means, medians of gradient norms and seconds, the last step's reference KL."""
    rows = [_HEAD]
    for group in groups(runs):
        drift = statistics.fmean(curve[-1] for curve in group.series("reference_k3"))
        seconds = (f"{group.seconds(part):.3f}" for part in ("rollout", "sync", "training", "step"))
        rows.append(
            (
                group.label,
                str(len(group.seeds)),
                f"{group.mean('exact', slice(0, _EDGE)):.3f}",
                f"{group.mean('exact', slice(-_EDGE, None)):.3f}",
                f"{group.mean('mismatch_mean'):.5f}",
                f"{drift:.1e}",
                f"{group.norms()['median']:.3f}",
                *seconds,
                f"{max(run['peak_bytes'] for run in group.runs) / 2**20:,.0f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([*lines, *filter(None, [sharing_note(runs)])])
