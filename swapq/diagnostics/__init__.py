"""Diagnostics: what runs on each side, the mismatch between trainer and rollout engine, which layers matter, and reports of a run."""

from swapq.diagnostics.audit import audit, running
from swapq.diagnostics.mismatch import Mismatch, MismatchSums, measure_mismatch
from swapq.diagnostics.reference import ReferenceKL, reference_kl
from swapq.diagnostics.sensitivity import Sensitivity, measure_sensitivity
from swapq.diagnostics.spikes import Spike, SpikeMeter, find_spikes

__all__ = [
    "Mismatch",
    "MismatchSums",
    "ReferenceKL",
    "Sensitivity",
    "Spike",
    "SpikeMeter",
    "audit",
    "find_spikes",
    "measure_mismatch",
    "measure_sensitivity",
    "reference_kl",
    "running",
]
