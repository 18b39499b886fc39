"""Server mode over two GPUs: `vllm serve` on one, the trainer on the other, codes and scales over NCCL between them.

`tests/trl/test_server.py` runs the same job on a CPU, with a file in the place of NCCL.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.helpers.ranks import WITHOUT_MULTICAST
from tests.helpers.server import Server, free_port
from tests.trl import server_job
from tests.trl.conftest import Job, job  # noqa: F401  a fixture

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")]

RECIPES = ("nvfp4-rl", "mxfp8-rl")
ENVIRONMENT = WITHOUT_MULTICAST | {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_HOST_IP": "127.0.0.1"}
OPTIONS = ["--max-model-len", "48", "--max-num-seqs", "32"]
#: servers that start together must not measure each other's memory: the cache has a size of its own
OPTIONS += ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2**30)]


def only(device: int) -> dict[str, str]:
    """The variables of a process that sees one of this process's GPUs."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": visible[device] if visible else str(device)}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """A server of each recipe on the first GPU; all start at once."""
    started: dict[str, Server] = {}
    try:
        for recipe in RECIPES:
            folder = server_job.export(recipe, tmp_path_factory.mktemp("served") / recipe)
            started[recipe] = Server(folder, environment=ENVIRONMENT | only(0), options=OPTIONS)
        yield started
    finally:
        for server in started.values():
            server.close()


@pytest.mark.timeout(280)
@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_and_scales_reach_the_server_over_nccl_at_every_step(
    servers: dict[str, Server],
    job: Job,  # noqa: F811
    recipe: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = servers[recipe]
    up = server.wait()
    for name, value in (ENVIRONMENT | only(1)).items():
        monkeypatch.setenv(name, value)  # the trainer's process is started with this process's variables
    try:
        result = job("server_job.train", recipe=recipe, url=server.url, group_port=free_port())
    except pytest.fail.Exception as failure:
        pytest.fail(f"{failure}\nThe server said:\n{server.said()}")
    server_job.judge(recipe, result, up)
    assert result["unlike"] == []
