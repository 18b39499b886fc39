"""Diagnostics: what runs on each side, the mismatch between trainer and rollout engine, and reports of a run."""

from swapq.diagnostics.audit import audit, running
from swapq.diagnostics.mismatch import Mismatch, MismatchSums, measure_mismatch

__all__ = ["Mismatch", "MismatchSums", "audit", "measure_mismatch", "running"]
