"""A worker of an engine of several processes that receives stacks itself, as each rank of an external launcher does."""

from typing import Any

import torch

from swapq.digest import tensor_digest
from swapq_vllm.receiver import receive
from swapq_vllm.served import Served
from swapq_vllm.worker import WorkerExtension
from tests.vllm import inside
from tests.vllm.stack import stack

__all__ = ["StackedWorker"]


class StackedWorker(WorkerExtension):
    """vLLM mixes this into its worker."""

    def receive_stacks(self, directory: str) -> dict[str, Any]:
        """Spoil the experts, receive a checkpoint's tensors as stacks, and say what was compared and what the first layer holds."""
        served = Served.of(self)
        for each in served.stacks.values():
            getattr(each.layer, each.parameter).data.view(torch.uint8).zero_()
        weights = {name: tensor.to(served.worker.device) for name, tensor in inside.weights(directory).items()}
        tensors = stack(weights, served.stacked_experts)
        arrived, equal, _, _ = receive(self, tensors.items(), {n: tensor_digest(t) for n, t in tensors.items()})
        first = next(iter(served.stacks.values()))
        return {"arrived": arrived, "equal": equal, "digest": tensor_digest(getattr(first.layer, first.parameter).data)}
