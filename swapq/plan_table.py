"""The printed plan: one line per group of alike tensors over layers and experts, exceptions with reasons, totals."""

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

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
        template = tuple("#" if part.isdecimal() else part for part in parts)
        key = (template, entry.role, entry.format, entry.reason, entry.shape, entry.dtype)
        line = lines.get(key)
        if line is None:
            line = lines[key] = _Line(entry, [set() for part in parts if part.isdecimal()], parts=parts)
        for known, part in zip(line.numbers, (p for p in parts if p.isdecimal()), strict=True):
            known.add(int(part))
        line.count += 1
        line.before += entry.bytes_before
        line.after += entry.bytes_after
    return list(lines.values())


def table(plan: "Plan") -> Group:
    """The plan as a rich renderable."""
    summary = plan.summary()
    grid = Table(title=f"{summary['family']} with {plan.recipe.name}", title_justify="left", header_style="bold", pad_edge=False, box=None)
    for name, justify in (("tensor", "left"), ("role", "left"), ("shape", "left"), ("dtype", "left"), ("n", "right"), ("format", "left")):
        grid.add_column(name, justify=justify, overflow="fold", no_wrap=name in ("n", "format"))  # type: ignore[arg-type]
    grid.add_column("bytes", justify="right", no_wrap=True)
    grid.add_column("reason", overflow="fold")
    for line in _lines(plan):
        entry = line.first
        size = human_bytes(line.before) if line.before == line.after else f"{human_bytes(line.before)} -> {human_bytes(line.after)}"
        style = "" if entry.quantized else "dim"
        shape = "x".join(str(n) for n in entry.shape) or "scalar"
        dtype = str(entry.dtype).removeprefix("torch.")
        grid.add_row(escape(line.name), entry.role.value, shape, dtype, str(line.count), entry.format, size, escape(entry.reason), style=style)
    rows: list[RenderableType] = [grid, Text("")]
    rows += [Text(f"{line}") for line in _totals(plan)]
    return Group(*rows)


def _totals(plan: "Plan") -> list[str]:
    s = plan.summary()
    ratio = s["bytes_after"] / s["bytes_before"] if s["bytes_before"] else 1.0
    lines = [
        f"{s['tensors']} tensors: {s['quantized']} quantized (as {s['quantized_weights']} weights), {s['kept']} stay as they are"
        + (f", {s['dropped']} dropped" if s["dropped"] else ""),
        f"{human_bytes(s['bytes_before'])} -> {human_bytes(s['bytes_after'])} ({ratio:.1%}), {s['bits_per_parameter']:.2f} bits per parameter, "
        f"{s['parameters']:,} parameters",
    ]
    for exception in s["exceptions"]:
        lines.append(f"exception: {exception['tensors']} {exception['role']} tensors stay: {exception['reason']}")
    for pattern, roles in s["patterns"].items():
        said = ", ".join(f"{count} {role}" for role, count in roles.items()) or "only tensors that another pattern keeps"
        lines.append(f"pattern {pattern!r}: {said}")
    return lines + [f"warning: {warning}" for warning in s["warnings"]]


def text(plan: "Plan") -> str:
    """The plan as plain text, wide enough for one line a group."""
    console = Console(file=io.StringIO(), width=200, color_system=None, force_terminal=False)
    console.print(table(plan))
    return console.file.getvalue().rstrip()  # type: ignore[attr-defined]  # it is the StringIO above
