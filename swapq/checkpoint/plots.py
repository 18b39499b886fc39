"""The picture of a verification: relative error of every quantized weight by layer, one colour a projection."""

import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from swapq.errors import CheckpointError, MissingPackageError

__all__ = ["draw_errors"]


def draw_errors(tensors: Mapping[str, Mapping[str, Any]], path: "str | os.PathLike[str]") -> Path:
    """Draw ``Verification.tensors`` of a verification beside its source into one PNG.

    Raises:
        CheckpointError: no tensor has a measured error (verify without a source measures none).
        MissingPackageError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            f"pictures need matplotlib, which cannot be imported ({error}); pip install 'swapq[report]'"
        ) from None
    points = _points(tensors)
    if not points:
        raise CheckpointError("nothing to draw: no tensor has a measured error; verify beside the source (--source)")
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for projection, rows in sorted(points.items()):
        axes.scatter([layer for layer, _ in rows], [error for _, error in rows], s=9, alpha=0.5, label=projection)
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error")
    axes.set_title("Error of each quantized weight against the source")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(loc="best", fontsize="small")
    target = Path(path)
    figure.savefig(target, dpi=130)
    return target


def _points(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    points: dict[str, list[tuple[int, float]]] = {}
    for name, row in tensors.items():
        parts = name.split(".")
        layer = next((int(b) for a, b in pairwise(parts) if a in ("layers", "h") and b.isdigit()), 0)
        if row.get("rel_error"):
            points.setdefault(f"{row['role']}: {parts[-2]}", []).append((layer, float(row["rel_error"])))
    return points
