"""Two ranks: codes, block scales and row scales are split where the recipe says, and nowhere else."""

from pathlib import Path

import pytest
import torch

import swapq
from tests.helpers import recipes
from tests.vllm import inside, updates
from tests.vllm.conftest import Exports, tiny
from tests.vllm.engine import Engine, EngineError
from tests.vllm.ranks import Pair, judge, observe

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "daemon": False}

#: ranks cut FP8 between its tiles of 128 only
WIDE = {"moe_intermediate_size": 256, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("recipe", ["nvfp4-rl", "mxfp8-rl", "fp8-block-rl", "int4-qat"])
def test_two_ranks_serve_what_one_does(tmp_path: Path, recipe: str) -> None:
    scores = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        model = tiny(**WIDE) if recipe == "fp8-block-rl" else tiny()
        swapq.export(swapq.convert(model, recipes.tiny(recipe), last_layers_bf16=0, expert_tp=ranks), folder)
        options = TWO if ranks == 2 else {}
        engine = Engine(
            folder, enforce_eager=True, worker_extension_cls="tests.vllm.stacked_worker.StackedWorker", **options
        )
        try:
            scores.append(engine(inside.score))
            answers = engine(inside.verify_workers, str(folder))
            shards, after = engine(updates.update_workers, str(folder))
            assert torch.equal(after, scores[-1]), "stacks filled a rank's shards otherwise than the loader"
            assert all(held["arrived"] == held["equal"] == len(swapq.digest(folder)) for held in shards)
            assert len({held["digest"] for held in shards}) == ranks, "ranks hold different parts"
        finally:
            engine.close()
        assert len(answers) == ranks
        for found in answers:
            assert not found["wrong"]
            assert not found["unsent"]
            assert "model.layers.0.mlp.gate.weight" in found["equal"]
    assert (scores[0] - scores[1]).abs().mean() < 0.1 * scores[0].std(), "the sums are split, the codes are not"


def test_ranks_of_whole_experts_serve_what_one_rank_does(tmp_path: Path) -> None:
    folder, scores = tmp_path / "export", []
    swapq.export(swapq.convert(tiny(), "nvfp4-rl", last_layers_bf16=0), folder)
    for ranks in (1, 2):
        options = TWO | {"enable_expert_parallel": True} if ranks == 2 else {}
        engine = Engine(
            folder, enforce_eager=True, worker_extension_cls="tests.vllm.stacked_worker.StackedWorker", **options
        )
        try:
            scores.append(engine(inside.score))
            shards, after = engine(updates.update_workers, str(folder))
            assert torch.equal(after, scores[-1])
            assert [held["arrived"] for held in shards] == [len(swapq.digest(folder))] * ranks
            assert len({held["digest"] for held in shards}) == ranks
        finally:
            engine.close()
    assert (scores[0] - scores[1]).abs().mean() < 0.1 * scores[0].std()


def test_another_number_of_ranks_than_the_recipes_is_refused(exports: Exports) -> None:
    with pytest.raises(EngineError, match=r"expert_tp=1|failed to start|initialization failed"):
        Engine(exports("nvfp4-rl"), enforce_eager=True, **TWO)


@pytest.mark.parametrize("recipe", ["nvfp4-rl", "mxfp8-rl"])
def test_ranks_hold_the_trainers_bytes_and_give_its_bits(recipe: str, tmp_path: Path) -> None:
    pair = Pair(recipe, tmp_path)
    judge(pair, observe(pair, {}), "cpu")
