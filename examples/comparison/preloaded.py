"""What every run imports, imported once: code only, no engine, no thread, no device."""

import comparison.training
import vllm
from vllm import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams", "comparison", "vllm"]
