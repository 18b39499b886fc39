"""The figures of a comparison: curves over seeds, whether they lie within the control's spread, gradient norms, seconds."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from comparison.configuration import ALL, CONTROL
from swapq.diagnostics import find_spikes

__all__ = [
    "WINDOW",
    "Group",
    "Spread",
    "control_of",
    "control_range",
    "groups",
    "larger_mismatch",
    "paired_norms",
    "running_mean",
    "setting",
    "sharing_note",
    "spread",
]

WINDOW = 10
"""Steps of the running mean of a curve, and of `first` and `last`."""
SETTLING = 3
"""Steps at the start whose seconds hold compilation."""


@dataclasses.dataclass(frozen=True)
class Group:
    """All finished runs of one configuration."""

    label: str
    runs: tuple[dict[str, Any], ...]

    @property
    def seeds(self) -> list[int]:
        """The seeds of the runs, ascending."""
        return [run["seed"] for run in self.runs]

    def series(self, name: str) -> list[list[float]]:
        """One list of values over steps for each seed."""
        return [[row[name] for row in run["rows"]] for run in self.runs]

    def mean_curve(self, name: str, window: int = 1) -> list[float]:
        """The mean over seeds of the (smoothed) curves."""
        curves = [running_mean(values, window) for values in self.series(name)]
        return [statistics.fmean(values) for values in zip(*curves, strict=True)]

    def median_curve(self, name: str, window: int) -> list[float]:
        """The mean over seeds of running medians: what single tokens cannot carry."""
        curves = [
            [statistics.median(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
            for values in self.series(name)
        ]
        return [statistics.fmean(values) for values in zip(*curves, strict=True)]

    def mean(self, name: str, part: slice = slice(None)) -> float:
        """The mean over seeds and the steps of `part`."""
        return statistics.fmean(value for values in self.series(name) for value in values[part])

    def medians(self, name: str, part: slice = slice(None)) -> list[float]:
        """The median over the steps of `part`, for each seed: k3 has a heavy tail, and one token can carry a mean."""
        return [statistics.median(values[part]) for values in self.series(name)]

    def per_seed(self, name: str, part: slice = slice(None)) -> list[float]:
        """The mean over the steps of `part`, for each seed."""
        return [statistics.fmean(values[part]) for values in self.series(name)]

    def seconds(self, part: str) -> float:
        """The median seconds of one part of a step, without those that compile where there are others."""
        return statistics.median(
            row["seconds"][part] for run in self.runs for row in run["rows"][SETTLING:] or run["rows"]
        )

    def norms(self) -> dict[str, float]:
        """Gradient norms of all seeds: median, 95th percentile, largest, deviation over mean, and the number of spikes."""
        values = sorted(value for curve in self.series("grad_norm") for value in curve)
        return {
            "median": statistics.median(values),
            "p95": values[min(len(values) - 1, int(0.95 * len(values)))],
            "max": values[-1],
            "variation": statistics.pstdev(values) / statistics.fmean(values),
            "spikes": float(sum(len(find_spikes(run["rows"])) for run in self.runs)),
        }


@dataclasses.dataclass(frozen=True)
class Spread:
    """How one configuration's learning compares with the control's."""

    steps_inside: float
    """Share of the steps at which its mean curve lies between the lowest and the highest control curve."""
    final_inside: bool
    """Whether its mean over the last steps does."""
    difference: float
    """Its mean over the last steps minus the control's, seed by seed."""
    deviation: float
    """The standard deviation of that difference over seeds; 0 for a single seed."""


def groups(runs: Sequence[dict[str, Any]]) -> list[Group]:
    """The runs by configuration, in the usual order; those without a run are left out."""
    found = []
    for configuration in ALL:
        own = sorted((run for run in runs if run["label"] == configuration.label), key=lambda run: run["seed"])
        if own:
            found.append(Group(configuration.label, tuple(own)))
    return found


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of the last `window` values at every place; fewer at the start."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def spread(group: Group, control: Group, name: str = "exact") -> Spread:
    """Compare the seeds that both have; the range is the control's own, over all its seeds.

    Raises:
        ValueError: they have no seed in common.
    """
    shared = sorted(set(group.seeds) & set(control.seeds))
    if not shared:
        raise ValueError(f"{group.label} and {control.label} have no seed in common: {group.seeds} and {control.seeds}")
    group = Group(group.label, tuple(run for run in group.runs if run["seed"] in shared))
    low, high = control_range(control, name)
    curve = group.mean_curve(name, WINDOW)
    inside = [a <= value <= b for value, a, b in zip(curve, low, high, strict=True)]
    last = slice(-WINDOW, None)
    paired = dict(zip(control.seeds, control.per_seed(name, last), strict=True))
    differences = [value - paired[seed] for seed, value in zip(group.seeds, group.per_seed(name, last), strict=True)]
    return Spread(
        steps_inside=sum(inside) / len(inside),
        final_inside=inside[-1],
        difference=statistics.fmean(differences),
        deviation=statistics.stdev(differences) if len(differences) > 1 else 0.0,
    )


def control_range(control: Group, name: str = "exact") -> tuple[list[float], list[float]]:
    """The lowest and the highest of the control's smoothed curves at every step."""
    curves = [running_mean(values, WINDOW) for values in control.series(name)]
    return [min(values) for values in zip(*curves, strict=True)], [max(values) for values in zip(*curves, strict=True)]


def larger_mismatch(one: Group, other: Group) -> dict[str, float]:
    """`one` against `other`, same seed and same step.

    Both means of |d log p| and their ratio, the medians of k3, the largest |d log p|, and the share of steps at which the mean of `one`
    is larger.
    """
    pairs = _paired(one, other, "mismatch_mean")
    mean = [statistics.fmean(values) for values in zip(*pairs, strict=True)]
    largest = [max(values) for values in zip(*_paired(one, other, "mismatch_max"), strict=True)]
    k3 = [statistics.median(values) for values in zip(*_paired(one, other, "mismatch_k3"), strict=True)]
    return {
        "mean": mean[0],
        "other_mean": mean[1],
        "ratio": mean[0] / mean[1],
        "share": sum(a > b for a, b in pairs) / len(pairs),
        "max": largest[0],
        "other_max": largest[1],
        "k3": k3[0],
        "other_k3": k3[1],
    }


def paired_norms(one: Group, other: Group) -> float:
    """The median over seeds and steps of `one`'s gradient norm over `other`'s."""
    return statistics.median(a / b for a, b in _paired(one, other, "grad_norm") if b > 0)


def _paired(one: Group, other: Group, name: str) -> list[tuple[float, float]]:
    """The values of both at the same seed and step."""
    theirs = dict(zip(other.seeds, other.series(name), strict=True))
    mine = dict(zip(one.seeds, one.series(name), strict=True))
    return [pair for seed in mine if seed in theirs for pair in zip(mine[seed], theirs[seed], strict=True)]


def control_of(found: Sequence[Group]) -> Group | None:
    """The control among the groups."""
    return next((group for group in found if group.label == CONTROL), None)


def setting(runs: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """The task with its model, and the devices of the runs, in words."""
    texts = dict.fromkeys(run.get("text", "sums: the main job's Qwen3-MoE") for run in runs)
    return ", ".join(texts), ", ".join(dict.fromkeys(run.get("device", "CPU") for run in runs))


def sharing_note(runs: Sequence[dict[str, Any]]) -> str:
    """A sentence where runs had neighbours on their device, whose seconds are not those of a run alone; empty otherwise."""
    shared = sorted({run.get("sharing", 1) for run in runs} - {1})
    if not shared:
        return ""
    numbers = " or ".join(map(str, shared))
    return f"Up to {numbers} runs shared one device at a time: the seconds are not those of a run alone."
