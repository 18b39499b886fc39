"""What is compared: one recipe with one backward mode each."""

import dataclasses
from pathlib import Path

__all__ = ["CONFIGURATIONS", "CONTROL", "Configuration", "named"]

_INT4 = Path(__file__).resolve().parent.parent / "arithmetic" / "int4-qat-g32.json"


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One line of the comparison."""

    label: str
    """What it is called in files, figures and tables."""
    recipe: str
    """A named recipe or a `.json` file."""
    backward: str | None = None
    """The backward mode; None is the recipe's own."""


CONTROL = "bf16"
CONFIGURATIONS = (
    Configuration(CONTROL, "bf16"),
    Configuration("mxfp8-low_precision", "mxfp8-rl", "low_precision"),
    Configuration("mxfp8-high_precision", "mxfp8-rl", "high_precision"),
    Configuration("mxfp8-dequantized", "mxfp8-rl", "dequantized"),
    Configuration("nvfp4-high_precision", "nvfp4-rl", "high_precision"),
    Configuration("nvfp4-dequantized", "nvfp4-rl", "dequantized"),
    Configuration("fp8-block-rl", "fp8-block-rl"),
    Configuration("fp8-rollout", "fp8-rollout"),
    # group 32: the usual 128 does not divide this model's 64
    Configuration("int4-qat", str(_INT4)),
)


def named(labels: list[str]) -> tuple[Configuration, ...]:
    """The configurations with these labels, in their usual order.

    Raises:
        ValueError: a label that is none.
    """
    known = {configuration.label for configuration in CONFIGURATIONS}
    if unknown := sorted(set(labels) - known):
        raise ValueError(f"unknown configuration {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return tuple(configuration for configuration in CONFIGURATIONS if configuration.label in labels)
