"""Server mode with a real `vllm serve` and the real trainer; on a CPU a file carries the packed tensors, on two GPUs NCCL does."""

from pathlib import Path

import pytest
import torch

from tests.helpers.server import Server
from tests.trl import server_job
from tests.trl.conftest import Job

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("vllm")


@pytest.mark.parametrize(
    ("recipe", "dtype"), [("nvfp4-rl", "bfloat16"), ("mxfp8-rl", "float32")], ids=["nvfp4-rl", "mxfp8-rl from FP32"]
)
def test_a_trainer_and_its_server_hold_the_same_bytes_at_every_step(
    job: Job, tmp_path: Path, recipe: str, dtype: str
) -> None:
    folder = server_job.export(recipe, tmp_path / "export", getattr(torch, dtype))
    own = {"VLLM_LOGGING_LEVEL": "INFO"}
    names = {"backend": "swapq_test_file", "extension": "tests.trl.file_transfer.FileWorker"}
    options = ["--max-model-len", "48", "--max-num-seqs", "16"]
    with Server(folder, environment=own, options=options, **names) as server:
        started = server.wait()
        try:
            result = job("server_job.train", recipe=recipe, url=server.url, group_port=0, transfer="file")
        except pytest.fail.Exception as failure:
            pytest.fail(f"{failure}\nThe server said:\n{server.said()}")
    server_job.judge(recipe, result, started)
    if dtype == "bfloat16":  # else the server answers in its checkpoint's dtype
        assert result["unlike"] == []
