"""Print every row beside its rival, measured in one run, and write JSON.

    python -m benchmarks.hopper                                 # all parts
    python -m benchmarks.hopper --only quantizers training      # some

Parts: quantizers, training, linear, block (needs vllm), engine (needs vllm; one process per engine), sync (needs vllm).
"""

import argparse
import dataclasses
import importlib
import json
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.hopper.needs import require

PARTS = ("quantizers", "training", "linear", "block", "engine", "sync")
IN_VLLM = ("block", "engine", "sync")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    served = ", ".join(part for part in options.only if part in IN_VLLM)
    require(parser, vllm=f"{served} (--only runs other parts)" if served else "")
    console, found = Console(width=170), []
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for part in options.only:
        for row in importlib.import_module(f"benchmarks.hopper.{part}").rows():
            found.append(dataclasses.asdict(row) | {"part": part})
            console.print(row.line())
            if options.json:  # after every row: what was measured stays, however this ends
                options.json.write_text(json.dumps(about | {"rows": found}, indent=1))
    table = Table(title=torch.cuda.get_device_name())
    for column in ("work", "ours", "rival", "unit", "ratio", "target", "met", "note"):
        table.add_column(column, justify="right" if column in ("ours", "rival", "ratio") else "left")
    for r in found:
        numbers = (f"{r['ours']:.2f}", f"{r['rival']:.2f}", r["unit"], f"{r['ratio']:.2f}")
        table.add_row(r["work"], *numbers, r["target"], "yes" if r["met"] else "no", r["note"])
    console.print(table)


if __name__ == "__main__":
    main()
