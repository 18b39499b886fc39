"""Which runs there are, which are done, and how the others are started: one process each, some at a time."""

import dataclasses
import json
import multiprocessing
import os
import sys
import threading
import time
from collections import deque
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from comparison.configuration import Configuration

__all__ = ["Order", "Schedule", "finished"]

_TAIL = 12
"""Lines of the log of a failed run that are shown."""


@dataclasses.dataclass(frozen=True)
class Order:
    """One run, as its own process is told."""

    configuration: Configuration
    seed: int
    steps: int
    path: Path
    """Of the result; the log lies beside it."""
    cache: Path
    task: str
    size: str
    eager: bool
    parallel: int
    """Runs at a time."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """All runs of a comparison, seed by seed, so that an interrupted one has whole seeds."""

    configurations: tuple[Configuration, ...]
    seeds: tuple[int, ...]
    steps: int
    directory: Path
    cache: Path
    task: str = "arithmetic"
    size: str = "tiny"
    parallel: int = 1
    eager: bool = False

    def path(self, configuration: Configuration, seed: int) -> Path:
        """The file of one run; it exists when the run is finished."""
        return self.directory / f"{configuration.label}-seed{seed}-steps{self.steps}.json"

    def orders(self) -> list[Order]:
        """Every run, finished or not."""
        common = (self.cache, self.task, self.size, self.eager, self.parallel)
        return [
            Order(configuration, seed, self.steps, self.path(configuration, seed), *common)
            for seed in self.seeds
            for configuration in self.configurations
        ]

    def carry_out(self) -> list[str]:
        """Start every run that is not finished, and say how each went; returns the names of those that failed."""
        orders = self.orders()
        missing = [order for order in orders if not order.path.exists()]
        print(f"{len(orders)} runs, {len(orders) - len(missing)} finished already", flush=True)
        if not missing:
            return []
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self._prepared():
            return [order.path.stem for order in missing]
        return self._run(missing)

    def _prepared(self) -> bool:
        """Make the supervised start once, before runs that would all make it."""
        log, began = self.directory / "start.log", time.perf_counter()
        process = _start(_prepare, log, self.task, self.size, self.cache)
        try:
            process.join()
        finally:
            _end([process])
        if process.exitcode == 0:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
            said = [line for line in lines if line.startswith("supervised start:")][-2:]
            print("\n".join([*said, f"supervised start: {time.perf_counter() - began:.0f} s"]), flush=True)
            return True
        print(f"supervised start: FAILED with exit code {process.exitcode}, see {log}\n{_tail(log)}", flush=True)
        return False

    def _run(self, missing: list[Order]) -> list[str]:
        failed, done, waiting = [], 0, deque(missing)
        slots = list(range(self.parallel))
        running: dict[Any, tuple[Any, Order, int, float]] = {}
        try:
            while waiting or running:
                while waiting and slots:
                    order, slot = waiting.popleft(), slots.pop(0)
                    process = _start(_target, order.path.with_suffix(".log"), order, slot)
                    running[process.sentinel] = (process, order, slot, time.perf_counter())
                for sentinel in wait(list(running)):
                    process, order, slot, began = running.pop(sentinel)
                    process.join()
                    slots.append(slot)
                    done += 1
                    # a result is whole or absent, whatever became of the engine's own end
                    ok = order.path.exists()
                    state = "done" if ok else _failure(order, process.exitcode)
                    seconds = time.perf_counter() - began
                    name = f"{order.configuration.label} seed {order.seed}"
                    print(f"{done}/{len(missing)} {name}: {state}, {seconds:.0f} s", flush=True)
                    if not ok:
                        print(_tail(order.path.with_suffix(".log")), flush=True)
                        failed.append(order.path.stem)
        finally:
            _end([process for process, *_ in running.values()])
        return failed


def finished(directory: Path, steps: int) -> list[dict[str, Any]]:
    """The results of the finished runs of `steps` steps, in the order of their names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob(f"*-steps{steps}.json"))]


def _failure(order: Order, code: int | None) -> str:
    return f"FAILED with exit code {code}, see {order.path.with_suffix('.log')}"


def _tail(log: Path) -> str:
    """The last lines of a log, indented."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"    {line[:300]}" for line in lines[-_TAIL:])


def _start(target: Any, log: Path, *arguments: Any) -> Any:
    """A process of its own, since an engine needs one; all it writes goes to `log`."""
    process = _context().Process(target=_logged, args=(log, target, *arguments))
    process.start()
    return process


def _end(processes: list[Any]) -> None:
    """End what still runs when the schedule is broken off."""
    for process in processes:
        if process.exitcode is None:
            process.terminate()
    for process in processes:
        process.join()


def _logged(log: Path, target: Any, *arguments: Any) -> None:
    """Everything, what libraries write past Python included."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    threading.Thread(target=_follow, args=(multiprocessing.parent_process(),), daemon=True).start()
    target(*arguments)


def _follow(parent: Any) -> None:
    """End with the parent: a run that nobody waits for would keep the device."""
    parent.join()
    os._exit(1)


def _prepare(task: str, size: str, cache: Path) -> None:
    from comparison.job import prepare

    prepare(task, size, cache)


def _target(order: Order, slot: int) -> None:
    if order.parallel > 1:
        # two engines must not write one folder of compiled code; runs that follow each other in a slot share it
        os.environ["VLLM_CACHE_ROOT"] = str(order.cache / "engine" / f"slot-{slot}")
    from comparison.training import run_to_file

    run_to_file(order)


def _context() -> Any:
    """A server that has imported vLLM, TRL and transformers once and forks for every run; new processes where there is a GPU,
    since CUDA does not survive a fork."""
    import torch

    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["comparison.preloaded"])
    return found
