"""The ablation's reasoning job from its command line, through the real TRL and the real vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.warm import ENVIRONMENT, ROOT

pytest.importorskip("vllm")
pytest.importorskip("reasoning_gym", reason="the extra `gym` is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.vllm]

COMMAND = ["--task", "reasoning", "--size", "tiny", "--steps", "2", "--seeds", "0", "--eager", "--parallel", "2"]


def _ablation(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH")]))
    own = ["--output", str(folder / "runs"), "--cache", str(folder / "cache")]
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "ablation.py"), *COMMAND, *own, *more],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=570,
    )


def test_a_run_is_trained_verified_kept_and_reported(tmp_path: Path) -> None:
    done = _ablation(tmp_path, "--only", "nvfp4-shared-mxfp8")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = tmp_path / "runs"
    result = json.loads((runs / "nvfp4-shared-mxfp8-seed0-steps2.json").read_text(encoding="utf-8"))
    assert [row["step"] for row in result["rows"]] == [1, 2]
    assert result["sync_tensors"] > 50
    assert result["recipe"]["weights"] == {"routed_experts": "nvfp4", "shared_experts": "mxfp8"}
    for row in result["rows"]:
        assert 0 < row["mismatch_mean"] < 0.1
        assert row["grad_norm"] > 0
        assert set(row["seconds"]) == {"rollout", "sync", "reference", "training", "step"}
    table = [line.split() for line in done.stdout.splitlines() if line.startswith("nvfp4-shared-mxfp8 ")]
    assert len(table) == 1
    assert (runs / "report.html").is_file()
    assert (runs / "nvfp4-shared-mxfp8-seed0-steps2.log").is_file()

    again = _ablation(tmp_path, "--only", "nvfp4-shared-mxfp8")
    assert again.returncode == 0
    assert "1 runs, 1 finished already" in again.stdout
    assert "seed 0: done" not in again.stdout
