"""Where the seconds of a step go: rollout, sync, reference, and training, which is the rest."""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

__all__ = ["StepClock"]


class StepClock(TrainerCallback):
    """A callback that times the parts of every step; `rows` holds one dict of seconds a step.

    `training` is what is left of the step's wall time: scoring the rollouts, loss, gradients and the optimizer.
    """

    def __init__(self, trainer: Any, reference: Any) -> None:
        self.rows: list[dict[str, float]] = []
        self._spent: dict[str, float] = {}
        self._begin = 0.0
        engine = trainer.vllm_generation
        engine.generate = self._timed("rollout", engine.generate)
        engine.sync_weights = self._timed("sync", engine.sync_weights)
        reference.forward = self._timed("reference", reference.forward)

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = _now()
            try:
                return function(*args, **kwargs)
            finally:
                self._spent[part] = self._spent.get(part, 0.0) + _now() - begin

        return timed

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The step starts: generation is part of it."""
        self._spent, self._begin = {"rollout": 0.0, "sync": 0.0, "reference": 0.0}, _now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The optimizer has stepped."""
        whole = _now() - self._begin
        self.rows.append({**self._spent, "training": whole - sum(self._spent.values()), "step": whole})


def _now() -> float:
    """Seconds, when the device has done what it was asked for: it runs behind the program."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
