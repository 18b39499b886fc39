"""The report: one HTML page with its figures inside, and the same tables as JSON for whoever wants the numbers."""

import base64
import dataclasses
import html
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparison.figures import draw_cost, draw_drift, draw_learning, draw_norms, draw_precision
from comparison.summary import (
    WINDOW,
    Group,
    control_of,
    groups,
    larger_mismatch,
    paired_norms,
    setting,
    sharing_note,
    spread,
)

__all__ = ["Table", "tables", "write_page"]

#: whose gradient norms are compared seed by seed and step by step
_PAIRS = (("mxfp8-high_precision", "mxfp8-dequantized"), ("nvfp4-high_precision", "nvfp4-dequantized"))


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, what it means in a sentence, the names of the columns, and rows of text."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables(runs: Sequence[dict[str, Any]], precision: Sequence[dict[str, Any]] = ()) -> list[Table]:
    """Everything the page says in numbers."""
    found = groups(runs)
    made = [_learning(found), _mismatch(found), _norms(found), _cost(found)]
    by_label = {group.label: group for group in found}
    if {"fp8-rollout", "fp8-block-rl"} <= set(by_label):
        made.insert(2, _two_policies(by_label["fp8-rollout"], by_label["fp8-block-rl"]))
    pairs = [(by_label[a], by_label[b]) for a, b in _PAIRS if a in by_label and b in by_label]
    if pairs:
        made.insert(-1, _modes(pairs))
    if precision:
        made.append(_precision(precision))
    return made


def write_page(
    runs: Sequence[dict[str, Any]], directory: Path, *, precision: Sequence[dict[str, Any]] = (), command: str = ""
) -> Path:
    """Write `report.html` and `tables.json` into `directory`; returns the path of the page."""
    found, made = groups(runs), tables(runs, precision)
    text, device = setting(runs)
    cost = "The tiny model on a CPU: seconds say little about a GPU." if device == "CPU" else f"On {device}."
    figures = {
        "Exact rate of sampled answers": (
            f"Running means over {WINDOW} steps. Thin: one seed. Thick: their mean. Grey: from the lowest to the highest bf16 seed.",
            draw_learning(found),
        ),
        "Mismatch and drift": (
            f"Means over seeds of running medians over {WINDOW} steps; what single tokens do is in the tables.",
            draw_drift(found),
        ),
        "Gradient norms": ("All steps of all seeds.", draw_norms(found)),
        "Time and memory": (f"{cost} {sharing_note(runs)}".strip(), draw_cost(found)),
    }
    if precision:
        note = "Not RL runs: a supervised model of 12 layers with shared experts, converted and compared with itself in BF16."
        figures["What stays in BF16"] = (note, draw_precision(precision))
    title = "swapq: recipes and backward modes beside each other"
    seeds = sorted({run["seed"] for run in runs})
    steps = runs[0]["steps"]
    parts = [
        _HEAD.format(title=html.escape(title)),
        f"<h1>{html.escape(title)}</h1>",
        f"<p>GRPO on {html.escape(text)}, on {html.escape(device)}; {len(runs)} runs of {steps} steps, {len(found)} configurations, seeds "
        f"{', '.join(map(str, seeds))}. Every run starts from the same supervised model; a seed decides prompts and sampling, "
        "alike for every configuration. Every weight sync was verified tensor by tensor.</p>",
    ]
    if command:
        parts.append(f"<p>Made by <code>{html.escape(command)}</code></p>")
    for table in made:
        parts += [f"<h2>{html.escape(table.title)}</h2>", f"<p>{html.escape(table.note)}</p>", _rendered(table)]
    for name, (note, png) in figures.items():
        encoded = base64.b64encode(png).decode("ascii")
        parts += [f"<h2>{html.escape(name)}</h2><p>{html.escape(note)}</p>"]
        parts += [f'<img alt="{html.escape(name)}" src="data:image/png;base64,{encoded}">']
    parts.append("</main></body></html>\n")
    directory.mkdir(parents=True, exist_ok=True)
    plain = {table.title: {"columns": table.columns, "rows": table.rows} for table in made}
    (directory / "tables.json").write_text(json.dumps(plain, indent=1), encoding="utf-8")
    page = directory / "report.html"
    page.write_text("\n".join(parts), encoding="utf-8")
    return page


def _learning(found: Sequence[Group]) -> Table:
    control = control_of(found)
    rows = []
    for group in found:
        start, end = group.mean("exact", slice(0, WINDOW)), group.per_seed("exact", slice(-WINDOW, None))
        row = [group.label, str(len(group.seeds)), f"{start:.3f}", f"{statistics.fmean(end):.3f}"]
        row.append(f"{min(end):.3f} to {max(end):.3f}")
        if control is None or group is control:
            row += ["", "", ""]
        else:
            verdict = spread(group, control)
            row += [f"{verdict.difference:+.3f} ± {verdict.deviation:.3f}", f"{verdict.steps_inside:.0%}"]
            row.append("yes" if verdict.final_inside else "NO")
        rows.append(tuple(row))
    return Table(
        "Learning",
        f"Exact rate of sampled answers, means over {WINDOW} steps. Inside: the configuration's mean curve lies between the lowest "
        "and the highest bf16 seed.",
        (
            "",
            "seeds",
            "start",
            "end",
            "end, by seed",
            "end minus bf16, by seed",
            "steps inside bf16's range",
            "end inside",
        ),
        rows,
    )


def _mismatch(found: Sequence[Group]) -> Table:
    rows = []
    for group in found:
        largest = max(value for curve in group.series("mismatch_max") for value in curve)
        late = group.mean("mismatch_mean", slice(-WINDOW, None)) / group.mean("mismatch_mean", slice(0, WINDOW))
        drift = group.medians("reference_k3", slice(-WINDOW, None))
        rows.append(
            (
                group.label,
                group.runs[0]["policies"],
                f"{group.mean('mismatch_mean'):.4f}",
                f"{min(group.per_seed('mismatch_mean')):.4f} to {max(group.per_seed('mismatch_mean')):.4f}",
                f"{largest:.2f}",
                f"{statistics.fmean(group.medians('mismatch_k3')):.1e}",
                f"{group.mean('ess'):.4f}",
                f"{late:.2f}",
                f"{statistics.fmean(curve[0] for curve in group.series('reference_k3')):.1e}",
                f"{statistics.fmean(drift):.4f} ({min(drift):.4f} to {max(drift):.4f})",
            )
        )
    return Table(
        "Mismatch between rollout and trainer, and drift from the BF16 start",
        "|d log p| of sampled tokens. The reference KL (k3) is against the supervised model in BF16; no loss sees it. Both k3 are medians "
        "over steps: behind a token that is almost never sampled a router near a tie may choose another expert on either side, and one "
        "such token carries a mean.",
        (
            "",
            "policies",
            "mean |d log p|",
            "by seed",
            "largest",
            "KL k3, median step",
            "ESS",
            "late / early mean",
            "reference KL, step 1",
            "reference KL, end (by seed)",
        ),
        rows,
    )


def _two_policies(rollout: Group, matched: Group) -> Table:
    figures = larger_mismatch(rollout, matched)
    return Table(
        "Why both sides are matched: fp8-rollout against fp8-block-rl",
        "The same FP8 weights in the engine, the same seeds and prompts; only the trainer differs: BF16, or the engine's own numbers.",
        ("", "fp8-rollout", "fp8-block-rl", "ratio"),
        [
            ("mean |d log p|", f"{figures['mean']:.4f}", f"{figures['other_mean']:.4f}", f"{figures['ratio']:.2f}"),
            (
                "KL k3, median step",
                f"{figures['k3']:.1e}",
                f"{figures['other_k3']:.1e}",
                f"{figures['k3'] / figures['other_k3']:.2f}",
            ),
            (
                "largest |d log p|",
                f"{figures['max']:.2f}",
                f"{figures['other_max']:.2f}",
                f"{figures['max'] / figures['other_max']:.2f}",
            ),
            ("steps at which fp8-rollout's mean is larger", f"{figures['share']:.0%}", "", ""),
        ],
    )


def _norms(found: Sequence[Group]) -> Table:
    rows = []
    for group in found:
        norms = group.norms()
        shown = (f"{norms[name]:.3f}" for name in ("median", "p95", "max", "variation"))
        rows.append((group.label, *shown, f"{norms['spikes']:.0f}"))
    return Table(
        "Gradient norms",
        "All steps of all seeds. A spike is five times the median of the steps before it.",
        ("", "median", "95th percentile", "largest", "deviation / mean", "spikes"),
        rows,
    )


def _modes(pairs: Sequence[tuple[Group, Group]]) -> Table:
    rows = []
    for high, dequantized in pairs:
        one, other = high.norms(), dequantized.norms()
        cells = (f"{one[name]:.3f} / {other[name]:.3f}" for name in ("median", "p95", "max", "variation"))
        spikes = f"{one['spikes']:.0f} / {other['spikes']:.0f}"
        ratio = f"{paired_norms(high, dequantized):.4f}"
        rows.append((high.label.split("-")[0], *cells, spikes, ratio))
    return Table(
        "Gradient norms, high_precision / dequantized",
        "The last column pairs the same seed and step: the median of high_precision's norm over dequantized's.",
        ("", "median", "95th percentile", "largest", "deviation / mean", "spikes", "paired ratio"),
        rows,
    )


def _cost(found: Sequence[Group]) -> Table:
    rows, note = [], sharing_note([run for group in found for run in group.runs])
    for group in found:
        run = group.runs[0]
        seconds = (f"{group.seconds(part):.3f}" for part in ("rollout", "sync", "training", "step"))
        sizes = [run["sync_bytes"], run["saved_for_backward"], max(r["peak_bytes"] for r in group.runs)]
        rows.append((group.label, *seconds, *(f"{size / 2**20:,.2f}" for size in sizes)))
    return Table(
        "Time and memory",
        "Median seconds of a step (training: scoring, loss, gradients, optimizer; the step also holds the reference's forward), and MiB: "
        "weights sent to the engine, tensors kept for the backward pass of 128 sequences of 8 tokens, and the peak of the "
        f"process, libraries and engine included (on a GPU: of its memory). {note}".strip(),
        ("", "rollout s", "sync s", "training s", "step s", "engine weights", "kept for backward", "process peak"),
        rows,
    )


def _precision(rows: Sequence[dict[str, Any]]) -> Table:
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["recipe"], row["first"], row["last"], row["shared"]), []).append(row)
    shown = []
    for (recipe, first, last, shared), own in cells.items():
        values = [row["kl"] for row in own]
        ratio = statistics.fmean(row["bytes"] / row["bytes_bf16"] for row in own)
        first_cell, shared_cell = ("BF16" if first else "quantized"), shared.replace("bf16", "BF16")
        spread_cell = f"{min(values):.1e} to {max(values):.1e}"
        shown.append(
            (
                recipe,
                f"{last:g}",
                first_cell,
                shared_cell,
                f"{statistics.fmean(values):.2e}",
                spread_cell,
                f"{ratio:.3f}",
            )
        )
    return Table(
        "What stays in BF16",
        "Not RL runs: KL(BF16 || converted) in nats an answer token, of supervised models (one a seed) of 12 layers with shared "
        "experts, over every sum of the task; bytes of the weights against BF16.",
        ("recipe", "last layers in BF16", "first layer", "shared experts", "KL", "by seed", "bytes"),
        shown,
    )


def _rendered(table: Table) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table.columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 0; background: #fff; color: #1c1c1c; }}
main {{ max-width: 72rem; margin: 0 auto; padding: 1.5rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.1rem; margin-top: 1.8rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 13px; }}
th, td {{ text-align: left; padding: .25rem 1rem .25rem 0; border-bottom: 1px solid #ddd; font-weight: normal; }}
th {{ color: #555; vertical-align: bottom; }} td {{ font-variant-numeric: tabular-nums; }}
img {{ max-width: 100%; height: auto; }}
</style></head><body><main>"""
