"""What the runs of a comparison train: a task, a model of one size, and the settings that go with them.

A job is named, so that a process of its own can be told which one; nothing here imports TRL or vLLM.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["SIZES", "TASKS", "Job", "job_of", "prepare"]

TASKS = ("arithmetic", "reasoning")
#: sizes of a task's model, its usual one first
SIZES = {"arithmetic": ("tiny",), "reasoning": ("200m", "200m-unshared", "tiny")}

_INT4_OF_SUMS = Path(__file__).resolve().parent.parent / "arithmetic" / "int4-qat-g32.json"


@dataclasses.dataclass(frozen=True)
class Job:
    """One task with one model."""

    task: str
    size: str
    text: str
    """The task and the model in a few words, for a report."""
    lesson: Any
    """`arithmetic.warmup.Lesson`: the supervised start's data and model."""
    warmup: Any
    """`arithmetic.warmup.Warmup`: its settings."""
    prompts: Callable[[int, int], Any]
    """(count, seed) -> the dataset of a run."""
    rewards: tuple[Callable[..., list[float]], ...]
    """The reward, and the exact rate that is shown."""
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of TRL's configuration other than the main job's."""
    kv_cache_bytes: int | None = None
    """Of the rollout engine; None lets it choose."""
    recipes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Named recipes that do not fit this model -> what is used in their place."""

    def recipe(self, name: str) -> str:
        """The recipe that `name` means for this model."""
        return self.recipes.get(name, name)


def job_of(task: str, size: str) -> Job:
    """The job of these names.

    Raises:
        ValueError: there is no such task, or no such size of its model.
    """
    if size not in SIZES.get(task, ()):
        raise ValueError(f"there is no model of size {size!r} for task {task!r}; there are {SIZES.get(task, TASKS)}")
    return _sums() if task == "arithmetic" else _reasoning(size)


def prepare(task: str, size: str, cache: Path) -> None:
    """Make the supervised start that all runs share, if `cache` has not got it."""
    from arithmetic.warmup import warm_model

    job, began = job_of(task, size), time.perf_counter()
    folder = warm_model(cache, job.warmup, lesson=job.lesson, quiet=True)
    print(f"{folder}: {time.perf_counter() - began:.0f} s", flush=True)


def _sums() -> Job:
    from arithmetic.task import exact_rate, prompts, reward
    from arithmetic.warmup import SUMS, Warmup

    return Job(
        task="arithmetic",
        size="tiny",
        text="sums: the main job's Qwen3-MoE",
        lesson=SUMS,
        warmup=Warmup(),
        prompts=prompts,
        rewards=(reward, exact_rate),
        # group 32: the usual 128 does not divide this model's 64
        recipes={"int4-qat": str(_INT4_OF_SUMS)},
    )


def _reasoning(size: str) -> Job:
    from arithmetic.warmup import Lesson, Warmup
    from reasoning import model, task

    tiny = size == "tiny"
    start = (
        Warmup(steps=100, batch=32, learning_rate=1e-3, p_right=0.7, ramp=20, clip=1.0, target=0.3)
        if tiny
        else Warmup(steps=1200, batch=256, learning_rate=5e-4, p_right=0.7, ramp=50, clip=1.0, target=0.38)
    )
    names = ", ".join(exercise.name for exercise in task.EXERCISES)
    return Job(
        task="reasoning",
        size=size,
        text=f"exercises of reasoning-gym ({names}): {model.family(size)} of size {size}",
        lesson=Lesson(
            name=f"reasoning-{size}",
            build_model=functools.partial(model.build_model, size),
            build_tokenizer=model.build_tokenizer,
            config=functools.partial(model.model_config, size),
            batch=task.supervised_batch,
            version=task.version(),
            on_gpu=True,
        ),
        warmup=start,
        prompts=task.prompts,
        rewards=(task.reward, task.exact_rate),
        training={
            "max_completion_length": task.MAX_COMPLETION_TOKENS,
            "vllm_max_model_length": model.CONTEXT,
            "learning_rate": 1e-4 if tiny else 2e-5,
            "vllm_gpu_memory_utilization": 0.02,  # what must be free at the start; the KV cache's size is given
        },
        # 128 sequences of 128 tokens take 0.2 GiB in the larger model
        kv_cache_bytes=2**28 if tiny else 2**29,
    )
