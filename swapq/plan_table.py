"""The printed plan: one line per group of alike tensors over layers and experts, exceptions with reasons, totals."""

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from swapq.anatomy import Role
from swapq.natural import ranges

if TYPE_CHECKING:
    from swapq.plan import Plan, PlanEntry

__all__ = ["human_bytes", "table", "text"]


@dataclass(slots=True)
class _Line:
    first: "PlanEntry"
    numbers: list[set[int]]
    count: int = 0
    before: int = 0
    after: int = 0
    parts: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        numbers = iter(self.numbers)
        return ".".join(_brackets(next(numbers)) if part.isdecimal() else part for part in self.parts)


def _brackets(numbers: set[int]) -> str:
    return str(next(iter(numbers))) if len(numbers) == 1 else f"[{ranges(numbers)}]"


def human_bytes(count: int) -> str:
    """``1.5 GB``: decimal units, as disks and the Hub count."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"


def _lines(plan: "Plan") -> list[_Line]:
    lines: dict[tuple[object, ...], _Line] = {}
    for entry in plan:
        parts = entry.name.split(".")
        numbers = [int(part) for part in parts if part.isdecimal()]
        template = tuple("#" if part.isdecimal() else part for part in parts)
        key = (template, entry.role, entry.format, entry.reason, entry.shape, entry.dtype)
        line = lines.get(key)
        if line is None:
            line = lines[key] = _Line(entry, [set() for _ in numbers], parts=parts)
        for known, number in zip(line.numbers, numbers, strict=True):
            known.add(number)
        line.count += 1
        line.before += entry.bytes_before
        line.after += entry.bytes_after
    return list(lines.values())


class _Table:
    """Renders itself to the width of the console: narrow ones get no shapes and no reasons, which the totals repeat."""

    def __init__(self, plan: "Plan") -> None:
        self.plan = plan

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _grid(self.plan, wide=options.max_width >= 110)
        yield Text("")
        for line in _totals(self.plan):
            yield Text(line)


def table(plan: "Plan") -> RenderableType:
    """The plan as a rich renderable."""
    return _Table(plan)


def _grid(plan: "Plan", *, wide: bool) -> Table:
    title = f"{plan.anatomy.family} with {plan.recipe.name}" + (
        "" if plan.recipe.matched else " (two different policies)"
    )
    grid = Table(title=escape(title), title_justify="left", header_style="bold", pad_edge=False, box=None)
    for column, justify in (
        ("tensor", "left"),
        ("shape", "left"),
        ("n", "right"),
        ("format", "left"),
        ("bytes", "right"),
        ("reason", "left"),
    ):
        if wide or column not in ("shape", "reason"):
            grid.add_column(column, justify=justify, overflow="fold", no_wrap=column not in ("tensor", "reason"))  # type: ignore[arg-type]
    every = _lines(plan)
    for role in Role:
        lines = [line for line in every if line.first.role is role]
        if lines:
            grid.add_row(role.value, style="bold")
        for line in lines:
            entry = line.first
            size = human_bytes(line.before)
            if line.after != line.before:
                size += f" -> {human_bytes(line.after)}"
            name = line.name if wide else line.name.removesuffix(".weight")
            cells = {
                "tensor": f"  {name}",
                "shape": _shape(entry),
                "n": str(line.count),
                "format": entry.format,
                "bytes": size,
                "reason": entry.reason,
            }
            shown = [escape(cells[str(column.header)]) for column in grid.columns]
            grid.add_row(*shown, style="" if entry.quantized else "dim")
    return grid


def _shape(entry: "PlanEntry") -> str:
    shape = "x".join(str(n) for n in entry.shape) or "scalar"
    dtype = str(entry.dtype).removeprefix("torch.")
    return shape if dtype == "bfloat16" else f"{shape} {dtype}"


def _totals(plan: "Plan") -> list[str]:
    s = plan.summary()
    ratio = s["bytes_after"] / s["bytes_before"] if s["bytes_before"] else 1.0
    lines = [
        f"{s['tensors']} tensors: {s['quantized']} quantized (as {s['quantized_weights']} weights), {s['kept']} stay as they are"
        + (f", {s['dropped']} dropped" if s["dropped"] else ""),
        f"{human_bytes(s['bytes_before'])} -> {human_bytes(s['bytes_after'])} ({ratio:.1%}), "
        f"{s['bits_per_parameter']:.2f} bits per parameter, {s['parameters']:,} parameters",
    ]
    wide = [entry.bytes_after for entry in plan if entry.format == "bf16" and entry.dtype == torch.float32]
    if wide:
        lines.append(
            f"{len(wide)} of those that stay are float32 ({human_bytes(sum(wide))}) and stay float32: bf16 above means not quantized"
        )
    lines.append(s["policies"])
    for exception in s["exceptions"]:
        lines.append(f"exception: {exception['tensors']} {exception['role']} tensors stay: {exception['reason']}")
    for pattern, roles in s["patterns"].items():
        said = (
            ", ".join(f"{count} {role}" for role, count in roles.items()) or "only tensors that another pattern keeps"
        )
        lines.append(f"pattern {pattern!r}: {said}")
    return lines + [f"warning: {warning}" for warning in s["warnings"]]


def text(plan: "Plan") -> str:
    """The plan as plain text, wide enough for one line a group."""
    console = Console(file=io.StringIO(), width=180, color_system=None, force_terminal=False)
    console.print(table(plan))
    return console.file.getvalue().rstrip()  # type: ignore[attr-defined]  # it is the StringIO above
