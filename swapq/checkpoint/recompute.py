"""The second half of verify: every tensor computed again from the source, compared bit for bit, its error measured."""

from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from swapq import formats
from swapq.checkpoint.described import Described
from swapq.checkpoint.layouts import Layout
from swapq.checkpoint.raw import as_bytes
from swapq.checkpoint.source import SourceFiles, expanded, quantized, vanished_blocks
from swapq.checkpoint.units import COPY_BUFFER, Copy, Expand, Unit, units_of
from swapq.errors import CheckpointError
from swapq.formats import Parts
from swapq.headers import Folder, TensorHeader
from swapq.plan import plan

__all__ = ["compare", "errors_of"]


def compare(
    folder: Folder,
    described: Described,
    layout: Layout,
    origin: Folder,
    files: SourceFiles,
    tensors: dict[str, dict[str, Any]],
    problems: list[str],
    totals: dict[str, Any],
    progress: bool,
) -> None:
    """Fill ``tensors`` with errors, and ``problems`` with what differs from a conversion of ``origin``.

    Raises:
        CheckpointError: no recipe says how the folder was made.
        SwapqError: the source cannot be planned or read.
    """
    if described.recipe is None:
        raise CheckpointError(
            "neither config.json nor swapq.json holds the recipe, so the folder cannot be compared with a source"
        )
    made = plan(origin.path, described.recipe)
    for name, fmt in made.quantized.items():
        if described.quantized.get(name) != fmt:
            problems.append(
                f"{name}: the recipe makes it {fmt}, the folder says {described.quantized.get(name, 'not quantized')}"
            )
    for name in described.quantized:
        if name not in made.quantized:
            problems.append(f"{name}: quantized here, and the recipe does not quantize it")
    units = units_of(made, origin, layout)
    promised = {o.name for unit in units for o in unit.outputs}
    problems += [
        f"{name}: is not made from any tensor of the source" for name in folder.tensors if name not in promised
    ]
    roles = {name: entry.role.value for entry in made for name in entry.tensors}
    sums: dict[str, list[float]] = {}
    theirs = SourceFiles(origin.path)
    try:
        for unit in track(units, "Comparing", transient=True, disable=not progress, console=Console(stderr=True)):
            _unit(unit, folder, layout, files, theirs, tensors, problems, roles, sums)
    finally:
        theirs.close()
    totals["underflowed_blocks"] = sum(int(row.get("underflowed_blocks", 0)) for row in tensors.values())
    totals["by_role"] = {role: _summary(*row) for role, row in sorted(sums.items())}


def _unit(
    unit: Unit,
    folder: Folder,
    layout: Layout,
    files: SourceFiles,
    theirs: SourceFiles,
    tensors: dict[str, dict[str, Any]],
    problems: list[str],
    roles: dict[str, str],
    sums: dict[str, list[float]],
) -> None:
    if isinstance(unit, Copy):
        header = folder.tensors.get(unit.source.name)
        if header is None:
            problems.append(f"{unit.source.name}: in the source and missing here")
        elif fault := _unlike(unit.source, header, theirs, files):
            problems.append(f"{unit.source.name}: not quantized, and {fault}")
        return
    if isinstance(unit, Expand):
        _check(unit.outputs[0].name, expanded(unit, theirs), folder, files, problems)
        return
    for target, rows, parts in quantized(unit, theirs):
        for name, tensor in layout.encode(target.weight, target.fmt, parts).items():
            _check(name, tensor, folder, files, problems)
        role = roles[target.weight]
        error, signal = errors_of(rows, target.fmt, parts)
        row = tensors.setdefault(target.weight, {"role": role, "format": target.fmt})
        row |= _summary(error, signal) | {"underflowed_blocks": vanished_blocks(rows, target.fmt, parts)}
        total = sums.setdefault(role, [0.0, 0.0])
        total[0] += error
        total[1] += signal


def errors_of(rows: Tensor, fmt: str, parts: Parts) -> tuple[float, float]:
    """Squared error and squared signal of one weight, in float64 sums."""
    form = formats.get(fmt)
    values = form.dequantize(parts, scope=form.default_scope, axis=-1)
    x = rows.float()
    return float((values - x).square().sum(dtype=torch.float64)), float(x.square().sum(dtype=torch.float64))


def _summary(error: float, signal: float) -> dict[str, float | None]:
    """Relative error and SQNR; the latter is None where nothing was lost."""
    ratio = error / signal if signal else 0.0
    return {
        "rel_error": ratio**0.5,
        "sqnr_db": None
        if ratio == 0
        else -10 * float(torch.log10(torch.tensor(ratio, dtype=torch.float64, device="cpu"))),
    }


def _check(name: str, expected: Tensor, folder: Folder, files: SourceFiles, problems: list[str]) -> None:
    header = folder.tensors.get(name)
    if header is None:
        problems.append(f"{name}: missing")
        return
    if header.dtype != expected.dtype and not (header.dtype == torch.float8_e8m0fnu and expected.dtype == torch.uint8):
        problems.append(f"{name}: stored as {header.dtype}, a conversion of the source gives {expected.dtype}")
        return
    if header.shape != tuple(expected.shape):
        problems.append(f"{name}: shape {list(header.shape)}, a conversion of the source gives {list(expected.shape)}")
        return
    found = files.tensor(header.file, header.start, header.dtype, header.shape, name)
    wrong = int((_flat(found) != _flat(expected)).sum())
    if wrong:
        problems.append(f"{name}: {wrong} of {header.nbytes} bytes differ from a conversion of the source")


def _flat(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def _unlike(source: TensorHeader, stored: TensorHeader, theirs: SourceFiles, ours: SourceFiles) -> str:
    """How a tensor that was to be copied differs from the source's, or empty."""
    if stored.shape != source.shape:
        return f"its shape is {list(stored.shape)}, the source's {list(source.shape)}"
    same = _same(source, stored, theirs, ours)
    if stored.dtype == source.dtype:
        return "" if same else "not bit-identical to the source"
    said = f"stored as {_name(stored.dtype)}, {_name(source.dtype)} in the source"
    if not same:
        return f"{said}; its values are others, too"
    exact = torch.promote_types(source.dtype, stored.dtype) == stored.dtype
    return f"{said}; only the dtype differs, the values are the source's" + ("" if exact else ", rounded")


def _same(source: TensorHeader, stored: TensorHeader, theirs: SourceFiles, ours: SourceFiles) -> bool:
    """Whether ``stored`` has the bytes of ``source``, cast to its dtype."""
    if source.dtype != stored.dtype and not (source.dtype.is_floating_point and stored.dtype.is_floating_point):
        return False
    widths = source.dtype.itemsize, stored.dtype.itemsize
    total = source.nbytes // widths[0]
    count = min(COPY_BUFFER // max(widths), total)
    left, right = (torch.empty(count * width, dtype=torch.uint8, device="cpu") for width in widths)
    for start in range(0, total, max(count, 1)):
        n = min(count, total - start)
        a, b = left[: n * widths[0]], right[: n * widths[1]]
        theirs.read_into(source.file, source.start + start * widths[0], as_bytes(a), source.name)
        ours.read_into(stored.file, stored.start + start * widths[1], as_bytes(b), stored.name)
        if source.dtype != stored.dtype:
            a = a.view(source.dtype).to(stored.dtype).view(torch.uint8)
        if not torch.equal(a, b):
            return False
    return True


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
