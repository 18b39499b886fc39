"""What is compared: one recipe with one backward mode each, and overrides of the recipe."""

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["ALL", "CONFIGURATIONS", "CONTROL", "PRECISION_BASE", "PRECISION_RUNS", "Configuration", "named"]


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One line of the comparison."""

    label: str
    """What it is called in files, figures and tables."""
    recipe: str
    """A named recipe or a `.json` file."""
    backward: str | None = None
    """The backward mode; None is the recipe's own."""
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Other fields of the recipe that are replaced."""

    def changes(self) -> dict[str, Any]:
        """What `swapq.convert` is told beside the recipe."""
        backward = {} if self.backward is None else {"backward": self.backward}
        return {**backward, **self.overrides}


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
    Configuration("int4-qat", "int4-qat"),
)

# NVFP4 is a format of routed experts: an engine serves other linears in 8 bits
_SHARED = {"routed_experts": "nvfp4", "shared_experts": "mxfp8"}
#: what stays in BF16, one thing changed at a time; "nvfp4-dequantized" is the recipe itself (last layers 0.15, first layer
#: quantized, shared experts BF16)
PRECISION_RUNS = (
    Configuration("nvfp4-last-0", "nvfp4-rl", "dequantized", {"last_layers_bf16": 0}),
    Configuration("nvfp4-last-0.3", "nvfp4-rl", "dequantized", {"last_layers_bf16": 0.3}),
    Configuration("nvfp4-first-bf16", "nvfp4-rl", "dequantized", {"first_layers_bf16": 1}),
    Configuration("nvfp4-shared-mxfp8", "nvfp4-rl", "dequantized", {"weights": _SHARED, "activations": _SHARED}),
)
#: labels that PRECISION_RUNS are read against
PRECISION_BASE = (CONTROL, "nvfp4-dequantized")
ALL = (*CONFIGURATIONS, *PRECISION_RUNS)


def named(labels: list[str]) -> tuple[Configuration, ...]:
    """The configurations with these labels, in their usual order.

    Raises:
        ValueError: a label that is none.
    """
    known = {configuration.label for configuration in ALL}
    if unknown := sorted(set(labels) - known):
        raise ValueError(f"unknown configuration {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return tuple(configuration for configuration in ALL if configuration.label in labels)
