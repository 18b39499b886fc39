"""Low-precision reinforcement learning of MoE language models: one recipe, one numeric contract, the same bytes on both sides."""

from swapq._version import __version__
from swapq.digest import digest
from swapq.errors import SwapqError
from swapq.qtensor import QTensor, quantize

__all__ = ["QTensor", "SwapqError", "__version__", "digest", "quantize"]
