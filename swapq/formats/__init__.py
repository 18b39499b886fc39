"""Formats: what bits mean. ``get("nvfp4")`` is the one way in; a new format joins the table below."""

from swapq.errors import FormatError
from swapq.formats.base import Format, Operand, Parts
from swapq.formats.fp8_block import FP8Block
from swapq.formats.int4 import INT4
from swapq.formats.mxfp8 import MXFP8
from swapq.formats.nvfp4 import NVFP4

__all__ = ["Format", "Operand", "Parts", "get", "is_scale", "names", "with_block"]

_ALL: tuple[Format, ...] = (MXFP8(), NVFP4(), FP8Block(), INT4(), INT4(32), NVFP4(tile=True))
_FORMATS: dict[str, Format] = {f.name: f for f in _ALL}
_SCALES = tuple({f".{suffix}" for f in _ALL for part, suffix in f.suffixes.items() if part != "codes"})


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


def with_block(name: str, block: int | None) -> Format:
    """The format called ``name``, or its sibling whose block is ``block``: ``int4`` comes in groups of 128 and of 32.

    Raises:
        FormatError: no such format, or none with such a block.
    """
    form = get(name)
    if block is None or block == form.block:
        return form
    siblings = {f.block: f for f in _ALL if type(f) is type(form) and f.scopes == form.scopes}
    if block not in siblings or siblings[block].name == form.name:
        choice = ", ".join(str(b) for b in sorted(siblings)) if len(siblings) > 1 else "no other"
        raise FormatError(
            f"{name}: block is {block}, but the format has blocks of {form.block}; choose {choice}, or leave it out"
        )
    return siblings[block]


def is_scale(name: str) -> bool:
    """Whether a checkpoint name is that of a scale, whose bits no dtype conversion may touch."""
    return name.endswith(_SCALES)
