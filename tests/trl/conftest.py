"""Runs a job of `jobs.py` in a process of its own: TRL's colocated engine takes one process's distributed world."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
}

Job = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """`job(name, **arguments)` runs that function of `jobs.py` and returns what it returned."""

    def run(name: str, **arguments: Any) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(name)
        answer = folder / "answer.json"
        done = subprocess.run(
            [sys.executable, "-m", "tests.trl.jobs", name, str(answer), json.dumps(arguments)],
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1", **os.environ, **ENVIRONMENT, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            pytest.fail(f"job {name}({arguments}) ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        result = json.loads(answer.read_text())
        result["left_in_tmp"] = sorted(path.name for path in folder.iterdir() if path.name.startswith("swapq-engine-"))
        return result

    return run
