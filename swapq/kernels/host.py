"""The memory of CPU tensors as numpy arrays, left as torch holds it.

``Tensor.numpy`` marks the storage as one that never changes its size again. FSDP2 frees a gathered parameter by resizing its storage to
nothing, and fails on a parameter that was once read so.
"""

import numpy as np
from torch import Tensor

__all__ = ["as_array"]


def as_array(x: Tensor) -> np.ndarray:
    """A view of ``x``, a tensor on the CPU in a dtype that numpy has. It keeps the memory alive."""
    return np.from_dlpack(x.detach())
