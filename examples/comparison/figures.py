"""The figures of the report, as PNG bytes."""

import io
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from comparison.summary import WINDOW, Group, control_of, control_range, running_mean

__all__ = ["draw_cost", "draw_drift", "draw_learning", "draw_norms", "draw_precision"]

_COLOURS = ("#1b1b1b", "#1f77b4", "#6baed6", "#08519c", "#d95f02", "#fdae6b", "#2ca02c", "#d62728", "#9467bd")
_COLOURS += ("#17becf", "#bcbd22", "#8c564b", "#e377c2")


def draw_learning(found: Sequence[Group]) -> bytes:
    """One panel a configuration: its seeds (thin), their mean (thick), and the range of the control's seeds (grey)."""
    control = control_of(found)
    columns = min(3, len(found))
    figure = _figure(3.3 * columns, 2.3 * math.ceil(len(found) / columns))
    shared = None
    for position, group in enumerate(found, start=1):
        axes = figure.add_subplot(math.ceil(len(found) / columns), columns, position, sharey=shared)
        shared = shared or axes
        steps = range(1, len(group.mean_curve("exact")) + 1)
        if control is not None:
            low, high = control_range(control)
            axes.fill_between(range(1, len(low) + 1), low, high, color="#999999", alpha=0.35, linewidth=0)
        for values in group.series("exact"):
            axes.plot(steps, running_mean(values, WINDOW), color=_colour(group), linewidth=0.7, alpha=0.6)
        axes.plot(steps, group.mean_curve("exact", WINDOW), color=_colour(group), linewidth=2)
        _dress(axes, group.label, legend=False)
    return _png(figure)


def draw_drift(found: Sequence[Group]) -> bytes:
    """Mismatch between rollout and trainer, and the KL against the BF16 model that training started from."""
    figure = _figure(10, 6.4)
    panels = (
        ("mismatch_mean", "mean |log-probability difference|, rollout to trainer", True),
        ("mismatch_k3", "KL(rollout || trainer), estimator k3", True),
        ("reference_k3", "KL(policy || BF16 start), estimator k3", False),
        ("ess", "effective sample size of the importance weights", False),
    )
    for position, (name, title, log_scale) in enumerate(panels, start=1):
        axes = figure.add_subplot(2, 2, position)
        for group in found:
            curve = group.median_curve(name, WINDOW)
            axes.plot(range(1, len(curve) + 1), curve, color=_colour(group), linewidth=1.4, label=group.label)
        if log_scale:
            axes.set_yscale("log")
        _dress(axes, title, legend=position == 1)
    return _png(figure)


def draw_norms(found: Sequence[Group]) -> bytes:
    """Gradient norms of the backward modes, beside each other: all steps of all seeds."""
    figure = _figure(10, 3.6)
    axes = figure.add_subplot(1, 2, 1)
    values = [[value for curve in group.series("grad_norm") for value in curve] for group in found]
    boxes = axes.boxplot(values, whis=(5, 95), showfliers=True, flierprops={"markersize": 2}, patch_artist=True)
    for box, group in zip(boxes["boxes"], found, strict=True):
        box.set(facecolor=_colour(group), alpha=0.5)
    axes.set_yscale("log")
    axes.set_xticks(range(1, len(found) + 1), [group.label for group in found], rotation=35, ha="right", fontsize=7)
    axes.set_title("gradient norm (box: quartiles, whiskers: 5 to 95 %)", fontsize=9)
    axes.tick_params(labelsize=7)
    axes = figure.add_subplot(1, 2, 2)
    for group in found:
        if group.label == "bf16" or group.label.endswith(("high_precision", "dequantized")):
            curve = group.median_curve("grad_norm", WINDOW)
            style = "--" if group.label.endswith("dequantized") else "-"
            axes.plot(range(1, len(curve) + 1), curve, style, color=_colour(group), linewidth=1.4, label=group.label)
    _dress(axes, f"gradient norm, running medians over {WINDOW} steps", legend=True)
    return _png(figure)


def draw_cost(found: Sequence[Group]) -> bytes:
    """Seconds of a step by part, and the bytes that differ between recipes."""
    figure = _figure(10, 3.4)
    axes = figure.add_subplot(1, 2, 1)
    places, left = range(len(found)), [0.0] * len(found)
    for part, colour in (("rollout", "#4c78a8"), ("sync", "#f58518"), ("training", "#54a24b")):
        seconds = [group.seconds(part) for group in found]
        axes.barh(places, seconds, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    _bars(axes, found, "seconds of a step, medians")
    axes.legend(fontsize=7)
    axes = figure.add_subplot(1, 2, 2)
    for shift, name, label, colour in (
        (-0.2, "saved_for_backward", "kept for the backward pass of 128 x 8 tokens", "#54a24b"),
        (0.2, "sync_bytes", "weights in the engine", "#f58518"),
    ):
        values = [group.runs[0][name] / 2**20 for group in found]
        axes.barh([place + shift for place in places], values, height=0.38, color=colour, label=label)
    _bars(axes, found, "MiB")
    axes.legend(fontsize=7)
    return _png(figure)


def draw_precision(rows: Sequence[dict[str, Any]]) -> bytes:
    """KL against the BF16 model over the fraction of last layers in BF16: one line for each choice of the other two."""
    figure = _figure(10, 3.2)
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    for position, recipe in enumerate(recipes, start=1):
        axes = figure.add_subplot(1, len(recipes), position)
        for first in (0, 1):
            for shared in ("bf16", "quantized"):
                own = [r for r in rows if (r["recipe"], r["first"], r["shared"]) == (recipe, first, shared)]
                fractions = sorted({row["last"] for row in own})
                cells = [[row["kl"] for row in own if row["last"] == fraction] for fraction in fractions]
                means = [sum(values) / len(values) for values in cells]
                label = (
                    f"first layer {'BF16' if first else 'quantized'}, shared experts {shared.replace('bf16', 'BF16')}"
                )
                (line,) = axes.plot(fractions, means, "--" if first else "-", marker="o", markersize=3, label=label)
                line.set_color("#1f77b4" if shared == "bf16" else "#d62728")
        axes.set_xlabel("fraction of last layers in BF16", fontsize=8)
        _dress(axes, f"{recipe}: KL(BF16 || converted), nats a token", legend=True, x_label=None)
        axes.set_ylim(bottom=0)
    return _png(figure)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # drawn without pyplot: no display, whatever backend is chosen
    return figure


def _colour(group: Group) -> str:
    from comparison.configuration import ALL

    return _COLOURS[[configuration.label for configuration in ALL].index(group.label)]


def _dress(axes: Any, title: str, *, legend: bool, x_label: str | None = "step") -> None:
    axes.set_title(title, fontsize=9)
    if x_label:
        axes.set_xlabel(x_label, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(visible=True, alpha=0.25)
    if legend:
        axes.legend(fontsize=6.5)


def _bars(axes: Any, found: Sequence[Group], title: str) -> None:
    axes.set_yticks(range(len(found)), [group.label for group in found], fontsize=7)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=7)
    axes.grid(visible=True, axis="x", alpha=0.25)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=95, format="png")
    return buffer.getvalue()
