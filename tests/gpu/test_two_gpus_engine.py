"""vLLM over two GPUs, by whole experts and by slices of them: the trainer's bytes and bits, and the scores of one GPU."""

from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import WITHOUT_MULTICAST

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")]

ENVIRONMENT = WITHOUT_MULTICAST | {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_HOST_IP": "127.0.0.1",
}
#: engines that start together must not measure each other's memory: the cache has a size of its own
OPTIONS = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**30}


@pytest.mark.parametrize("recipe", ["nvfp4-rl", "mxfp8-rl"])
def test_engines_of_two_gpus_hold_the_trainers_bytes_and_give_its_bits(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.vllm.ranks import KINDS, Pair, judge, observe

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    pair = Pair(recipe, tmp_path)
    judge(pair, observe(pair, OPTIONS, at_once=len(KINDS)), "cuda")
