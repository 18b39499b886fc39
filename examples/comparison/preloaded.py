"""What every run imports, imported once: code only, no engine, no thread, no device."""

import vllm
from vllm import LLM, SamplingParams

import comparison.training

__all__ = ["LLM", "SamplingParams", "comparison", "vllm"]
