"""The live table of a run: the newest steps, redrawn in place."""

import collections
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import TrainerCallback

# title, name of the metric, format
COLUMNS = (
    ("step", "step", "{:.0f}"),
    ("reward", "reward", "{:.3f}"),
    ("exact", "rewards/exact_rate/mean", "{:.3f}"),
    ("mismatch mean", "swapq/mismatch_abs_mean", "{:.4f}"),
    ("max", "swapq/mismatch_abs_max", "{:.3f}"),
    ("KL k3", "swapq/mismatch_k3", "{:.1e}"),
    ("ESS", "swapq/mismatch_ess", "{:.4f}"),
    ("sync s", "swapq/sync_seconds", "{:.3f}"),
    ("verified", "swapq/sync_tensors_verified", "{:.0f}"),
    ("step s", "step_time", "{:.2f}"),
)


class LiveTable(TrainerCallback):
    """A callback that shows the newest `rows` steps and a bar; without a terminal it prints one line every 10 steps."""

    def __init__(self, steps: int, title: str, rows: int = 12) -> None:
        self.title = title
        self.console = Console()
        self.newest: collections.deque[dict[str, Any]] = collections.deque(maxlen=rows)
        self.progress = Progress(
            TextColumn("GRPO"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=self.console
        )
        self.bar = self.progress.add_task("GRPO", total=steps)
        self.live = Live(console=self.console, get_renderable=self._render, refresh_per_second=4)

    def __enter__(self) -> "LiveTable":
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Show the step that was just logged."""
        if not logs or "reward" not in logs:
            return
        row = {**logs, "step": state.global_step}
        self.newest.append(row)
        self.progress.update(self.bar, completed=state.global_step)
        if not self.console.is_terminal and (state.global_step % 10 == 0 or state.global_step == 1):
            cells = (f"{title} {text}" for (title, _, _), text in zip(COLUMNS, _cells(row), strict=True))
            self.console.print("  ".join(cells), soft_wrap=True)

    def _render(self) -> Group:
        table = Table(title=self.title)
        for title, _, _ in COLUMNS:
            table.add_column(title, justify="right")
        for row in self.newest:
            table.add_row(*_cells(row))
        return Group(table, self.progress)


def _cells(row: dict[str, Any]) -> list[str]:
    return [shape.format(float(row[name])) if name in row else "-" for _, name, shape in COLUMNS]
