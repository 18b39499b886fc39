"""Which runs there are, which are done, and how the others are started: one process each, one at a time."""

import dataclasses
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

from comparison.configuration import Configuration

__all__ = ["Schedule", "finished"]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """All runs of a comparison, seed by seed, so that an interrupted one has whole seeds."""

    configurations: tuple[Configuration, ...]
    seeds: tuple[int, ...]
    steps: int
    directory: Path
    cache: Path

    def path(self, configuration: Configuration, seed: int) -> Path:
        """The file of one run; it exists when the run is finished."""
        return self.directory / f"{configuration.label}-seed{seed}-steps{self.steps}.json"

    def carry_out(self) -> list[str]:
        """Start every run that is not finished, and say how each went; returns the names of those that failed."""
        runs = [(configuration, seed) for seed in self.seeds for configuration in self.configurations]
        missing = [(configuration, seed) for configuration, seed in runs if not self.path(configuration, seed).exists()]
        print(f"{len(runs)} runs, {len(runs) - len(missing)} finished already", flush=True)
        failed = []
        for number, (configuration, seed) in enumerate(missing, start=1):
            path, began = self.path(configuration, seed), time.perf_counter()
            code = _in_own_process(configuration, seed, self.steps, path, self.cache)
            seconds = time.perf_counter() - began
            state = "done" if code == 0 else f"FAILED with exit code {code}, see {path.with_suffix('.log')}"
            print(f"{number}/{len(missing)} {configuration.label} seed {seed}: {state}, {seconds:.0f} s", flush=True)
            if code != 0:
                failed.append(path.stem)
        return failed


def finished(directory: Path, steps: int) -> list[dict[str, Any]]:
    """The results of the finished runs of `steps` steps, in the order of their names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob(f"*-steps{steps}.json"))]


def _in_own_process(configuration: Configuration, seed: int, steps: int, path: Path, cache: Path) -> int:
    """One run to its end; an engine needs a process of its own."""
    process = _context().Process(target=_target, args=(configuration, seed, steps, path, cache))
    process.start()
    process.join()
    return process.exitcode or 0


def _target(*arguments: Any) -> None:
    from comparison.training import run_logged

    run_logged(*arguments)


def _context() -> Any:
    """A server that has imported vLLM, TRL and transformers once and forks for every run; new processes where there is a GPU,
    since CUDA does not survive a fork."""
    import torch

    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["comparison.preloaded"])
    return found
