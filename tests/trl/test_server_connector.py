"""What outlives an update in a real `vllm serve`: a KV connector's store, and requests of other clients."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.server import Server
from tests.trl import server_job
from tests.trl.conftest import Job

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def found(job: Job, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = server_job.export("nvfp4-rl", tmp_path_factory.mktemp("served") / "export", torch.bfloat16)
    store = tmp_path_factory.mktemp("kv")
    transfer = {
        "kv_connector": "ForgettingConnector",
        "kv_connector_module_path": "tests.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(store)},
    }
    options = ["--max-model-len", "512", "--max-num-seqs", "16", "--block-size", "32"]
    options += ["--kv-transfer-config", json.dumps(transfer), "--enable-prompt-tokens-details"]
    names = {"backend": "swapq_test_file", "extension": "tests.trl.connector_worker.ConnectorWorker"}
    with Server(folder, environment={"VLLM_LOGGING_LEVEL": "INFO"}, options=options, **names) as server:
        server.wait()
        try:
            return job("server_job.outlived", recipe="nvfp4-rl", url=server.url, store=str(store))
        except pytest.fail.Exception as failure:
            pytest.fail(f"{failure}\nThe server said:\n{server.said()}")


def test_after_an_update_a_servers_connector_brings_nothing_back(found: dict[str, Any]) -> None:
    (over_first, cached), again = found["first"]
    assert cached == 0
    assert again == [over_first, 32], "nothing was cached that could come back"
    assert found["others"][1] == 0
    assert found["others"][0] != over_first
    assert found["restored"] == [over_first, 0]


def test_a_request_that_runs_is_finished_with_the_weights_it_began_with(found: dict[str, Any]) -> None:
    assert found["running_at_the_sync"]
    assert found["over_others"], "other weights give the same answer"
    assert found["undisturbed"]


def test_a_connector_that_fails_to_forget_is_an_error_and_the_server_goes_on_with_its_weights(
    found: dict[str, Any],
) -> None:
    assert found["failed"]["error"] == "SyncError"
    assert "did not empty its caches" in found["failed"]["message"]
    assert not found["paused"]
    assert found["after_failing"] == found["first"][0][0]


def test_a_servers_connector_that_cannot_forget_is_refused_when_the_trainer_is_built(found: dict[str, Any]) -> None:
    assert found["keeping"]["error"] == "UnsupportedError"
    assert "ForgettingConnector, has no reset_cache()" in found["keeping"]["message"]
