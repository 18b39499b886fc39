"""The ablation: every recipe and backward mode on one job, with the same seeds and data, and one report.

    python examples/ablation.py                         # 9 configurations, 3 seeds, 60 steps each; finished runs are kept
    python examples/ablation.py --only bf16 fp8-rollout # some of them
    python examples/ablation.py --report                # only write the report of what is finished
    python examples/ablation.py --task reasoning --size 200m --parallel 4 --seeds 0    # a larger model on a GPU

The usual job is the main job's: sums and a model that a CPU trains. After its runs it measures which parts of a model should stay in
BF16, on converted models that are not trained further. `--task reasoning` takes exercises of the package reasoning-gym and a model of
245M parameters or a tiny one; `--precision-runs` trains it with other parts in BF16.
"""

import argparse
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

from comparison.configuration import ALL, CONFIGURATIONS, PRECISION_BASE, PRECISION_RUNS, named
from comparison.job import SIZES, TASKS
from comparison.schedule import Schedule, finished
from reasoning import INSTALL, PACKAGE

ROOT = Path(__file__).resolve().parent.parent
PRECISION = "precision.json"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    labels = [configuration.label for configuration in ALL]
    usual = [configuration.label for configuration in CONFIGURATIONS]
    add("--task", choices=TASKS, default=TASKS[0], help="what is learned (default: arithmetic)")
    add("--size", help=f"of the task's model (default: the first): {SIZES}")
    add(
        "--only",
        nargs="+",
        metavar="LABEL",
        help=f"configurations, of {', '.join(labels)}; default: {', '.join(usual)}",
    )
    add(
        "--precision-runs",
        action="store_true",
        help="configurations that differ in what stays in BF16, for nvfp4-rl: last layers 0, 0.15 or 0.3, first layer, shared experts",
    )
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of prompts and sampling (default: 0 1 2)")
    add("--steps", type=int, default=60, help="GRPO steps of a run (default: 60)")
    add("--parallel", type=int, default=1, help="runs at a time, all on one device (default: 1)")
    add("--eager", action="store_true", help="rollout engines without compilation and CUDA graphs: they start sooner")
    add("--output", type=Path, help="folder of runs and report (default: runs/ablation[-TASK-SIZE])")
    add("--cache", type=Path, help="where the supervised start is kept (default: .cache/TASK)")
    add("--report", action="store_true", help="start no run: write the report of what is finished")
    options = parser.parse_args(arguments)
    for name in ("steps", "parallel"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1; got {getattr(options, name)}")
    if options.size is None:
        options.size = SIZES[options.task][0]
    if options.size not in SIZES[options.task]:
        parser.error(f"--size of --task {options.task} is one of {', '.join(SIZES[options.task])}; got {options.size}")
    if options.precision_runs and options.only:
        parser.error("--precision-runs chooses configurations, and so does --only: give one of them")
    try:
        options.configurations = named(options.only or _labels(options.precision_runs))
    except ValueError as error:
        parser.error(str(error))
    own = sorted({one.label for one in options.configurations} & {one.label for one in PRECISION_RUNS})
    if own and options.task == "arithmetic":
        parser.error(
            f"{', '.join(own)}: the model of sums has 4 layers and no shared experts, so these would not differ; use --task reasoning"
        )
    name = "ablation" if options.task == "arithmetic" else f"ablation-{options.task}-{options.size}"
    options.output = options.output or ROOT / "runs" / name
    options.cache = options.cache or ROOT / ".cache" / options.task
    return options


def main() -> int:
    """Exit codes: 0 every run is finished and reported; 1 some failed, or the page cannot be drawn; 2 nothing can be run or reported."""
    options = parse_arguments()
    if options.task == "reasoning" and not options.report and importlib.util.find_spec(PACKAGE) is None:
        print(f"error: {INSTALL}", file=sys.stderr)
        return 2
    failed = [] if options.report else _carry_out(options)
    runs = finished(options.output, options.steps)
    if not runs:
        print(f"error: no run of {options.steps} steps is finished in {options.output}", file=sys.stderr)
        return 2
    from comparison.outcome import outcome

    print(outcome(runs), flush=True)
    try:
        from comparison.page import write_page
    except ModuleNotFoundError as error:
        print(
            f"error: no report, since {error.name} is missing: pip install 'swapq[report]', then --report",
            file=sys.stderr,
        )
        return 1
    measured = []
    if options.task == "arithmetic":
        from comparison.precision import measure

        measured = measure(options.output / PRECISION, () if options.report else tuple(options.seeds))
    print(f"report: {write_page(runs, options.output, precision=measured, command=_command(options))}")
    return 1 if failed else 0


def _labels(precision_runs: bool) -> list[str]:
    return (
        [*PRECISION_BASE, *(c.label for c in PRECISION_RUNS)] if precision_runs else [c.label for c in CONFIGURATIONS]
    )


def _carry_out(options: argparse.Namespace) -> list[str]:
    if options.parallel > 1:
        # each run's own share of the cores; more threads would only wait for each other
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.parallel)))
    # a time limit ends the runs too, so that none keeps the device
    signal.signal(signal.SIGTERM, _stop)
    return Schedule(
        options.configurations,
        tuple(options.seeds),
        options.steps,
        options.output,
        options.cache,
        task=options.task,
        size=options.size,
        parallel=options.parallel,
        eager=options.eager,
    ).carry_out()


def _stop(number: int, frame: Any) -> None:
    sys.exit(128 + number)


def _command(options: argparse.Namespace) -> str:
    task = "" if options.task == "arithmetic" else f" --task {options.task} --size {options.size}"
    return f"python examples/ablation.py{task} --steps {options.steps} --seeds {' '.join(map(str, options.seeds))}"


if __name__ == "__main__":
    sys.exit(main())
