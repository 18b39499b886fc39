"""What a recipe costs in memory: bytes kept for the backward pass, and the process's peak."""

import resource
from typing import Any

import torch

__all__ = ["peak_bytes", "saved_for_backward"]


def saved_for_backward(model: Any, ids: torch.Tensor) -> int:
    """Bytes that one training forward of `ids` (sequences, tokens) keeps for its backward, parameters apart.

    Counted per storage, so two views of one tensor count once.
    """
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # holding the storages keeps their addresses distinct

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    model.train()
    device = ids.device.type
    with torch.autocast(device, dtype=torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(input_ids=ids).logits.float().logsumexp(-1).sum()
    total = sum(storage.nbytes() for storage in kept.values())
    del loss
    return total


def peak_bytes() -> int:
    """The largest resident size this process has had, libraries included; on a GPU the largest allocation."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
