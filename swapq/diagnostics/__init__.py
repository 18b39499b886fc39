"""Diagnostics: the mismatch between trainer and rollout engine, and reports of a run."""

from swapq.diagnostics.mismatch import Mismatch, MismatchSums, measure_mismatch

__all__ = ["Mismatch", "MismatchSums", "measure_mismatch"]
