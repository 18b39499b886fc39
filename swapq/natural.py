"""Numeric order of dotted names: ``layers.2`` before ``layers.10``."""

__all__ = ["natural_key", "ranges"]


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key in which numbers compare as numbers."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split("."))


def ranges(numbers: set[int]) -> str:
    """Compact text of a set of numbers: ``0-3,7``."""
    out: list[str] = []
    start = last = -2
    for n in sorted(numbers):
        if n == last + 1:
            last = n
            continue
        if start >= 0:
            out.append(f"{start}-{last}" if last > start else f"{start}")
        start = last = n
    if start >= 0:
        out.append(f"{start}-{last}" if last > start else f"{start}")
    return ",".join(out)
