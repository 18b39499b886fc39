"""transformers: ``from_pretrained`` and ``save_pretrained`` of quantized checkpoints. Importing swapq registers it."""

from swapq.hf.config import SwapqConfig
from swapq.hf.quantizer import SwapqHfQuantizer

__all__ = ["SwapqConfig", "SwapqHfQuantizer"]
