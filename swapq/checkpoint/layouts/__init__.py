"""Layouts: how quantized checkpoints name and store what formats define. ``get("swapq")`` is the way in."""

from swapq.checkpoint.layouts.base import Layout, Stored
from swapq.checkpoint.layouts.compressed_tensors import CompressedTensorsLayout
from swapq.checkpoint.layouts.modelopt import ModelOptLayout
from swapq.checkpoint.layouts.swapq import SwapqLayout
from swapq.errors import UnsupportedError

__all__ = ["Layout", "Stored", "get", "names"]

_LAYOUTS: dict[str, Layout] = {
    layout.name: layout for layout in (SwapqLayout(), ModelOptLayout(), CompressedTensorsLayout())
}


def get(name: str) -> Layout:
    """The layout called ``name``.

    Raises:
        UnsupportedError: no such layout.
    """
    if name not in _LAYOUTS:
        raise UnsupportedError(f"layout {name!r} is not one that swapq writes; choose one of {', '.join(_LAYOUTS)}")
    return _LAYOUTS[name]


def names() -> tuple[str, ...]:
    """Names of the layouts."""
    return tuple(_LAYOUTS)
