"""What every tensor of an MoE model is: roles, experts and Hub names, for live models and for checkpoint folders alike."""

from swapq.anatomy.disk import of_checkpoint, of_folder
from swapq.anatomy.family import FAMILIES, Family
from swapq.anatomy.live import of_model
from swapq.anatomy.role import NEVER_QUANTIZED, QUANTIZABLE, Role
from swapq.anatomy.tensor import Anatomy, ExpertsLayout, ExpertSlot, Quantization, TensorInfo

__all__ = [
    "FAMILIES",
    "NEVER_QUANTIZED",
    "QUANTIZABLE",
    "Anatomy",
    "ExpertSlot",
    "ExpertsLayout",
    "Family",
    "Quantization",
    "Role",
    "TensorInfo",
    "of_checkpoint",
    "of_folder",
    "of_model",
]
