"""FSDP2 over two GPUs: a converted model's bytes, logits, gradients and export are those of one GPU. CPUs run the same over gloo."""

from pathlib import Path

import pytest
import torch

from tests.helpers import fsdp
from tests.helpers.ranks import spawn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    spawn(fsdp.steps, str(folder), device="cuda")
    return folder


@pytest.mark.parametrize(("recipe", "backward"), fsdp.CASES)
def test_a_sharded_step_over_nccl_is_that_of_one_gpu(results: Path, recipe: str, backward: str) -> None:
    fsdp.judge(results, recipe, backward)
