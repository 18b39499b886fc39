"""Formats: what bits mean. ``get("nvfp4")`` is the one way in; a new format joins the table below."""

from swapq.errors import FormatError
from swapq.formats.base import Format, Operand, Parts
from swapq.formats.mxfp8 import MXFP8
from swapq.formats.nvfp4 import NVFP4

__all__ = ["Format", "Operand", "Parts", "get", "names"]

_FORMATS: dict[str, Format] = {f.name: f for f in (MXFP8(), NVFP4())}


def get(name: str) -> Format:
    """The format called ``name``.

    Raises:
        FormatError: no such format.
    """
    if not isinstance(name, str) or name not in _FORMATS:
        raise FormatError(f"unknown format {name!r}; choose one of {', '.join(_FORMATS)}")
    return _FORMATS[name]


def names() -> tuple[str, ...]:
    """Names of the formats that can quantize."""
    return tuple(_FORMATS)
