"""Processes of one distributed group, on CPUs (gloo) or on GPUs (nccl), and what training tests ask of sharded models."""

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from swapq.nn.gather import whole

__all__ = ["WITHOUT_MULTICAST", "WORLD", "shard", "spawn", "train_step", "whole_gradients"]

WORLD = 2
#: NVLink multicast belongs to the whole host: GPUs that others share must not take it
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}


def spawn(job: Callable[..., Any], *arguments: object, device: str = "cpu") -> None:
    """Run ``job(rank, device, *arguments)`` in :data:`WORLD` processes that are one group; ``device``: ``"cpu"`` or ``"cuda"``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, args=(port, device, job, arguments), nprocs=WORLD)


def _rank(rank: int, port: int, device: str, job: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD}
    os.environ.update(WITHOUT_MULTICAST | {name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(here)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        rank=rank,
        world_size=WORLD,
        device_id=here if device == "cuda" else None,
    )
    try:
        job(rank, here, *arguments)
    finally:
        dist.destroy_process_group()


def shard(model: PreTrainedModel, policy: MixedPrecisionPolicy | None = None) -> None:
    """FSDP2 of ``model``: experts, layers, then the rest, each gathered by itself."""
    policy = policy or MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mp_policy=policy)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def train_step(model: nn.Module, ids: Tensor) -> None:
    """Gradients of the language-model loss on ``ids [B, T]``."""
    model(ids, labels=ids).loss.backward()


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Name -> whole gradient. Every rank must call this."""
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        found[name.removeprefix("module.")] = whole(p.grad).clone()
    return found
