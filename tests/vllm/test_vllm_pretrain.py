"""A pretraining recipe whose rollout was forced: the engine computes what the trainer does, and shows why it is refused otherwise."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import swapq
from swapq.errors import SwapqError
from tests.vllm import inside
from tests.vllm.conftest import tiny
from tests.vllm.engine import Engine

pytestmark = pytest.mark.vllm
OPTIONS = {"last_layers_bf16": 1, "force_rollout": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pretrain") / "export"
    swapq.export(swapq.convert(tiny(), "nvfp4-pretrain", **OPTIONS), path)
    return path


@pytest.fixture(scope="module")
def forced(folder: Path) -> Iterator[Engine]:
    engine = Engine(folder, enforce_eager=True)
    yield engine
    engine.close()


def test_without_force_there_is_nothing_to_serve(tmp_path: Path) -> None:
    model = swapq.convert(tiny(), "nvfp4-pretrain", last_layers_bf16=1)
    with pytest.raises(SwapqError, match=r"neighbours|other tokens|force_rollout"):
        swapq.export(model, tmp_path / "refused")


def test_the_forced_engine_holds_the_exports_bytes_and_the_trainers_bits(forced: Engine, folder: Path) -> None:
    assert forced(inside.served_digests) == swapq.digest(folder)
    model = swapq.convert(tiny(), "nvfp4-pretrain", **OPTIONS)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 64, generator=generator).to(torch.bfloat16)
    x[3] *= 40  # a loud token sets the scale of all
    ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(9)])
    weights = torch.rand(9, 2, generator=generator)
    ours = forced(inside.experts, 0, x, ids, weights)
    with torch.no_grad():
        trainers = model.model.layers[0].mlp.experts(x, ids, weights)
    assert torch.equal(ours.view(torch.int16), trainers.view(torch.int16))
    assert ours.abs().max() > 0.01
    alone = forced(inside.experts, 0, x[-1:], ids[-1:], weights[-1:])
    assert not torch.equal(alone[0], ours[-1]), "one scale for all tokens, yet a row does not feel its neighbours"
