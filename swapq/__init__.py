"""Low-precision reinforcement learning of MoE language models: one recipe, one numeric contract, the same bytes on both sides."""

# ruff: noqa: E402
from swapq._torchao import import_quietly

import_quietly()

from swapq._version import __version__
from swapq.checkpoint.conversion import convert_checkpoint
from swapq.checkpoint.export import export
from swapq.checkpoint.restore import load_checkpoint
from swapq.checkpoint.verify import verify
from swapq.convert import convert, frozen_weights, is_converted, recipe_of
from swapq.digest import digest
from swapq.errors import SwapqError
from swapq.hf import SwapqConfig
from swapq.nn.replay import record_routing, replay_routing
from swapq.plan import Plan, plan
from swapq.qtensor import QTensor, quantize
from swapq.recipe import Recipe

__all__ = [
    "Plan",
    "QTensor",
    "Recipe",
    "SwapqConfig",
    "SwapqError",
    "__version__",
    "convert",
    "convert_checkpoint",
    "digest",
    "export",
    "frozen_weights",
    "is_converted",
    "load_checkpoint",
    "plan",
    "quantize",
    "recipe_of",
    "record_routing",
    "replay_routing",
    "verify",
]
