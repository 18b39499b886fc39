"""Runs the notebooks without Jupyter, each in a process and a namespace of its own: what a reader sees is what the tests execute.

python scripts/notebooks.py                      # run all of examples/notebooks; exit code 1 if a cell fails
python scripts/notebooks.py --write NOTEBOOK...  # and keep printed text and figures in the files
"""

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "notebooks"


def run_cells(notebook: dict[str, Any]) -> None:
    """Execute the code cells in order, in one namespace, and keep what each shows as its outputs.

    Raises:
        Exception: whatever a cell raises.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown: list[dict[str, Any]] = []

    def show(*_: Any, **__: Any) -> None:
        for number in pyplot.get_fignums():
            buffer = io.BytesIO()
            pyplot.figure(number).savefig(buffer, dpi=72, bbox_inches="tight")
            png = base64.b64encode(buffer.getvalue()).decode("ascii")
            shown.append({"output_type": "display_data", "metadata": {}, "data": {"image/png": png}})
        pyplot.close("all")

    pyplot.show = show
    namespace: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        shown.clear()
        # a real file: vLLM asks standard output for its descriptor
        with tempfile.TemporaryFile("w+", encoding="utf-8") as text:
            with contextlib.redirect_stdout(text):
                _execute("".join(cell["source"]), namespace, f"cell {count}")
                show()  # a figure left open is shown at the end of its cell
            text.seek(0)
            lines = text.readlines()
        cell["execution_count"] = count
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []
        cell["outputs"] += shown


def _execute(source: str, namespace: dict[str, Any], name: str) -> None:
    """Run one cell; the value of its last line, if it has one, is printed."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        if value is not None:
            print(value)


def run_here(path: Path, *, write: bool) -> None:
    """Run one notebook in this process, from its own folder as Jupyter does."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    os.chdir(path.parent)
    run_cells(notebook)
    if write:
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    """Run the notebooks, one process each."""
    # tiny models: a second thread gains little, and beside other work its barriers cost a lot
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of examples/notebooks")
    parser.add_argument("--write", action="store_true", help="keep printed text and figures in the files")
    parser.add_argument("--here", action="store_true", help="in this process: for a single notebook")
    options = parser.parse_args()
    paths = [path.resolve() for path in options.notebooks] or sorted(FOLDER.glob("*.ipynb"))
    if options.here:
        for path in paths:
            run_here(path, write=options.write)
        return 0
    failed = 0
    for path in paths:
        flags = ["--write"] if options.write else []
        code = subprocess.run([sys.executable, __file__, "--here", *flags, str(path)], check=False).returncode
        print(f"{path.name}: {'done' if code == 0 else f'FAILED with exit code {code}'}", flush=True)
        failed += code != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
