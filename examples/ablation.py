"""The ablation: every recipe and backward mode on the main job, with the same seeds and data, and one report.

    python examples/ablation.py                         # 9 configurations, 3 seeds, 60 steps each; finished runs are kept
    python examples/ablation.py --only bf16 fp8-rollout # some of them
    python examples/ablation.py --report                # only write the report of what is finished

After the runs it measures which parts of a model should stay in BF16, on converted models that are not trained further.
"""

import argparse
import sys
from pathlib import Path

from comparison.configuration import CONFIGURATIONS, named
from comparison.schedule import Schedule, finished

ROOT = Path(__file__).resolve().parent.parent
PRECISION = "precision.json"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    labels = [configuration.label for configuration in CONFIGURATIONS]
    add(
        "--only", nargs="+", metavar="LABEL", default=labels, help=f"configurations (default: all): {', '.join(labels)}"
    )
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of prompts and sampling (default: 0 1 2)")
    add("--steps", type=int, default=60, help="GRPO steps of a run (default: 60)")
    add(
        "--output",
        type=Path,
        default=ROOT / "runs" / "ablation",
        help="folder of runs and report (default: runs/ablation)",
    )
    cache = ROOT / ".cache" / "arithmetic"
    add("--cache", type=Path, default=cache, help="where the supervised start is kept (default: .cache/arithmetic)")
    add("--report", action="store_true", help="start no run: write the report of what is finished")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1; got {options.steps}")
    try:
        options.configurations = named(options.only)
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> int:
    """Exit codes: 0 every run is finished and reported; 1 some failed (the report holds the others); 2 nothing to report."""
    options = parse_arguments()
    failed = []
    if not options.report:
        schedule = Schedule(options.configurations, tuple(options.seeds), options.steps, options.output, options.cache)
        failed = schedule.carry_out()
    runs = finished(options.output, options.steps)
    if not runs:
        print(f"error: no run of {options.steps} steps is finished in {options.output}", file=sys.stderr)
        return 2
    from comparison.page import write_page
    from comparison.precision import measure

    measured = measure(options.output / PRECISION, () if options.report else tuple(options.seeds))
    command = f"python examples/ablation.py --steps {options.steps} --seeds {' '.join(map(str, options.seeds))}"
    print(f"report: {write_page(runs, options.output, precision=measured, command=command)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
