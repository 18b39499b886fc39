"""transformers: ``from_pretrained`` and ``save_pretrained`` of quantized checkpoints. Importing swapq registers it."""

from swapq.hf.config import SwapqConfig
from swapq.hf.foreign import ForeignConfig, foreign_config
from swapq.hf.quantizer import SwapqHfQuantizer

__all__ = ["ForeignConfig", "SwapqConfig", "SwapqHfQuantizer", "foreign_config"]
