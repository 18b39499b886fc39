"""Reports of a training run: PNG curves and one self-contained HTML page that opens anywhere, without a network."""

import base64
import dataclasses
import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swapq.errors import MissingPackageError, SwapqError

__all__ = ["PANELS", "Panel", "draw_curves", "write_report"]

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Panel:
    """One diagram: a title and its lines, label -> name of the logged metric."""

    title: str
    lines: Mapping[str, str]
    log_scale: bool = False
    smooth: int = 1
    """Width of the running mean drawn over the single values; 1 draws the values only."""


PANELS: tuple[Panel, ...] = (
    Panel("Reward", {"reward": "reward"}, smooth=10),
    Panel(
        "Log-probability mismatch, rollout against trainer",
        {"mean |difference|": "swapq/mismatch_abs_mean", "max |difference|": "swapq/mismatch_abs_max"},
        log_scale=True,
    ),
    Panel("KL(rollout || trainer), estimator k3", {"k3": "swapq/mismatch_k3"}, log_scale=True),
    Panel(
        "Importance weights",
        {"effective sample size": "swapq/mismatch_ess", "masked fraction": "swapq/mismatch_masked_fraction"},
    ),
    Panel("Weight sync, seconds", {"seconds": "swapq/sync_seconds"}),
    Panel("Step time, seconds", {"seconds": "step_time"}, log_scale=True),
)
"""The diagrams of a GRPO or RLOO run of `swapq_trl`."""


def draw_curves(history: Sequence[Row], path: str | os.PathLike[str], panels: Sequence[Panel] = PANELS) -> Path:
    """Draw the metrics of `history` (rows with a `step`, as in `trainer.state.log_history`) into one PNG.

    A panel without a single value is left out.

    Raises:
        SwapqError: no row has a value for any panel.
        MissingPackageError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            f"reports need matplotlib, which cannot be imported ({error}); install it with: pip install 'swapq[report]'"
        ) from None
    drawn = [(panel, lines) for panel in panels if (lines := _values(history, panel))]
    if not drawn:
        names = sorted({name for panel in panels for name in panel.lines.values()})
        raise SwapqError(f"nothing to draw: no row of the history has a finite value of {', '.join(names)}")
    columns = min(2, len(drawn))
    rows = math.ceil(len(drawn) / columns)
    # drawn without pyplot: no global state, no display, whatever backend the user has chosen
    figure = Figure(figsize=(6.4 * columns, 3.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for position, (panel, lines) in enumerate(drawn, start=1):
        axes = figure.add_subplot(rows, columns, position)
        for label, (steps, values) in lines.items():
            if panel.smooth > 1 and len(values) > panel.smooth:
                (line,) = axes.plot(steps, values, linewidth=0.8, alpha=0.35)
                axes.plot(steps, _running_mean(values, panel.smooth), color=line.get_color(), linewidth=2, label=label)
            else:
                axes.plot(steps, values, linewidth=1.4, label=label)
        if panel.log_scale and all(value > 0 for _, values in lines.values() for value in values):
            axes.set_yscale("log")
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(visible=True, alpha=0.25)
        if len(lines) > 1:
            axes.legend(fontsize=8)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def write_report(
    history: Sequence[Row],
    directory: str | os.PathLike[str],
    *,
    title: str,
    tables: Mapping[str, Mapping[str, object]] | None = None,
    panels: Sequence[Panel] = PANELS,
) -> Path:
    """Write `curves.png`, `history.json` and `report.html` into `directory`; returns the path of the page.

    The page holds its image and style inside itself. `tables` are shown above the curves: title -> label -> value.
    """
    directory = Path(directory)
    curves = draw_curves(history, directory / "curves.png", panels)
    text = json.dumps([{k: _plain(v) for k, v in row.items()} for row in history], indent=1, default=str)
    (directory / "history.json").write_text(text, encoding="utf-8")
    parts = [_HEAD.replace("{title}", html.escape(title)), f"<h1>{html.escape(title)}</h1>"]
    for name, rows in (tables or {}).items():
        parts.append(f"<h2>{html.escape(name)}</h2><table>")
        for label, value in rows.items():
            parts.append(f"<tr><th>{html.escape(str(label))}</th><td>{html.escape(_shown(value))}</td></tr>")
        parts.append("</table>")
    encoded = base64.b64encode(curves.read_bytes()).decode("ascii")
    parts.append(f'<h2>Curves</h2><img alt="Curves of the run" src="data:image/png;base64,{encoded}">')
    parts.append("</main></body></html>\n")
    page = directory / "report.html"
    page.write_text("\n".join(parts), encoding="utf-8")
    return page


def _values(history: Sequence[Row], panel: Panel) -> dict[str, tuple[list[float], list[float]]]:
    """Label -> (steps, finite values) of the lines that have any."""
    lines = {}
    for label, name in panel.lines.items():
        points = [
            (float(row["step"]), float(row[name]))
            for row in history
            if isinstance(row.get(name), int | float) and math.isfinite(row[name]) and "step" in row
        ]
        if points:
            lines[label] = ([x for x, _ in points], [y for _, y in points])
    return lines


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean of the last `width` values at every place; fewer at the start."""
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        means.append(sum(window) / len(window))
    return means


def _plain(value: Any) -> Any:
    """JSON has no infinities and no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 0; background: #fff; color: #1c1c1c; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 1.8rem; }
table { border-collapse: collapse; }
th, td { text-align: left; padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid #ddd; font-weight: normal; }
th { color: #555; } td { font-variant-numeric: tabular-nums; }
img { max-width: 100%; height: auto; }
</style></head><body><main>"""
