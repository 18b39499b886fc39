"""The notebooks run as a reader would run them, cell by cell, without Jupyter and without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
# those that start an engine or take most of a minute
SLOW = {"2_convert_export_serve.ipynb", "3_grpo_and_mismatch.ipynb", "4_choosing_a_recipe.ipynb"}


def _run(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    roots = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
    environment = {**os.environ, "PYTHONPATH": roots, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "scripts" / "notebooks.py"), *flags, str(path)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=570)


def _notebook(*sources: str) -> str:
    cells = [{"cell_type": "code", "id": f"c{n}", "metadata": {}, "source": [text]} for n, text in enumerate(sources)]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [], id=name) for name in NOTEBOOKS],
)
def test_a_notebook_runs_from_its_first_cell_to_its_last(name: str) -> None:
    done = _run(FOLDER / name)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


def test_the_four_notebooks_are_there_in_their_order() -> None:
    assert [name[0] for name in NOTEBOOKS] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_in_git_shows_the_whole_run_and_no_error(name: str) -> None:
    cells = [c for c in json.loads((FOLDER / name).read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds <= {"stream", "display_data"}
    assert (FOLDER / name).stat().st_size < 300_000


def test_a_cell_that_fails_fails_the_notebook(tmp_path: Path) -> None:
    path = tmp_path / "bad.ipynb"
    path.write_text(_notebook("x = 1", "assert x == 2, 'x is not 2'"), encoding="utf-8")
    done = _run(path)
    assert done.returncode == 1
    assert "x is not 2" in done.stderr


def test_written_outputs_hold_prints_the_last_value_and_figures(tmp_path: Path) -> None:
    path = tmp_path / "good.ipynb"
    source = "import matplotlib.pyplot as plt\nprint('printed')\nplt.plot([1, 2])\n6 * 7"
    path.write_text(_notebook(source), encoding="utf-8")
    assert _run(path, "--write").returncode == 0
    stream, figure = json.loads(path.read_text(encoding="utf-8"))["cells"][0]["outputs"]
    assert stream["text"] == ["printed\n", "42\n"]
    assert "image/png" in figure["data"]
