"""What the fork server of `warm` imports: code only, no engine, no thread, no device."""

import contextlib

import swapq
import swapq_trl

with contextlib.suppress(ImportError):  # tests that need vLLM skip themselves
    import vllm
    from vllm import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams", "swapq", "swapq_trl", "vllm"]
