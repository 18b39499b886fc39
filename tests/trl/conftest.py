"""Runs a job of `jobs.py` in a process of its own: TRL's colocated engine takes one process's distributed world."""

import importlib
import json
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.warm import ENVIRONMENT, ROOT, context

Job = Callable[..., dict[str, Any]]


def _run(name: str, arguments: dict[str, Any], folder: Path, answer: Path, log: Path) -> None:
    """In the process of the job: what it prints goes to its log, what it leaves behind into its folder."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.update(ENVIRONMENT | {"TMPDIR": str(folder)})
    tempfile.tempdir = None
    os.chdir(ROOT)
    try:
        module, _, function = name.rpartition(".")
        job = getattr(importlib.import_module(f"tests.trl.{module or 'jobs'}"), function)
        answer.write_text(json.dumps(job(**arguments)))
    except BaseException:
        traceback.print_exc()
        raise


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """`job(name, **arguments)` runs that function of `jobs.py`, or `module.function`, and returns what it returned."""

    def run(name: str, **arguments: Any) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(name)
        answer, log = folder / "answer.json", folder / "log.txt"
        start: Any = context()
        process = start.Process(target=_run, args=(name, arguments, folder, answer, log))
        process.start()
        try:
            process.join()
        finally:
            if process.is_alive():  # the test ran out of time
                process.kill()
        if process.exitcode != 0:
            pytest.fail(f"job {name}({arguments}) ended with {process.exitcode}\n{log.read_text()[-8000:]}")
        result = json.loads(answer.read_text())
        result["left_in_tmp"] = sorted(path.name for path in folder.iterdir() if path.name.startswith("swapq-engine-"))
        return result

    return run
