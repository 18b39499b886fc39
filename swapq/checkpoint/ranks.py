"""The processes that hold one model together: who of them writes a checkpoint, and how all learn what came of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from swapq.errors import CheckpointError

__all__ = ["Ranks"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """Place of this process among those of the default process group.

    Attributes:
        rank: of this process; 0 where there is no group.
        world: how many processes there are.
        sharded: the model's parameters are spread over them, so all must gather together.
    """

    rank: int
    world: int
    sharded: bool

    @classmethod
    def of(cls, model: nn.Module) -> "Ranks":
        """The place of this process, for ``model``."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls(0, 1, False)
        # after a forward FSDP2 leaves its root gathered, with plain tensors for parameters
        sharded = any(isinstance(m, FSDPModule) for m in model.modules()) or any(
            isinstance(p, DTensor) for p in model.parameters()
        )
        return cls(dist.get_rank(), dist.get_world_size(), sharded)

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def attempt(self, step: Callable[[], Any]) -> None:
        """Run ``step``. Ranks of a sharded model wait for each other and all raise if it failed on any of them.

        Raises:
            CheckpointError: another rank failed, naming it and what it said. This rank's own error comes as it is.
        """
        if not self.sharded:
            step()
            return
        error: Exception | None = None
        try:
            step()
        except Exception as caught:  # noqa: BLE001 - every rank must reach the exchange below, or the others wait for ever
            error = caught
        said: list[str | None] = [None] * self.world
        dist.all_gather_object(said, None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = next((rank for rank, message in enumerate(said) if message), None)
        if failed is not None:
            raise CheckpointError(f"rank {failed} could not take its part in writing the checkpoint ({said[failed]})")
