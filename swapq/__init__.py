"""Low-precision reinforcement learning of MoE language models: one recipe, one numeric contract, the same bytes on both sides."""

from swapq._version import __version__
from swapq.errors import SwapqError

__all__ = ["SwapqError", "__version__"]
