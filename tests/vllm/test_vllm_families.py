"""Other MoE families load, serve every byte of their checkpoint, and take an update: merged, shared and MLA layers included."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import swapq
from tests.helpers.models import FAMILIES
from tests.helpers.recipes import tiny
from tests.vllm import faults, inside, updates
from tests.vllm.engine import Engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SIZES = {
    "qwen2_moe": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32},  # vLLM derives 32 = 64 / 2
    "mixtral": {"head_dim": 32},
    "deepseek_v3": {  # the latent sizes that the CPU engine knows
        "topk_method": "noaux_tc",
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "moe_intermediate_size": 64,
    },
}


@pytest.fixture(
    scope="module",
    params=[(f, r) for f in SIZES for r in ("nvfp4-rl", "mxfp8-rl", "fp8-block-rl", "int4-qat")],
    ids="-".join,
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
    family, recipe = request.param
    model = FAMILIES[family](**SIZES[family]).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp(family) / recipe
    swapq.export(swapq.convert(model, tiny(recipe), last_layers_bf16=0), folder)
    engine = Engine(folder, enforce_eager=True)
    yield engine, folder
    engine.close()


def test_it_serves_the_folder_and_takes_it_again(served: tuple[Engine, Path]) -> None:
    engine, folder = served
    assert "SwapqExpertsMethod" in engine(inside.methods).values()
    assert engine(inside.served_digests) == swapq.digest(folder)
    before = engine(inside.score)
    assert before.isfinite().all()
    report = engine(updates.update, str(folder))
    assert report["verified"] == len(swapq.digest(folder))
    assert torch.equal(engine(inside.score), before)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
    """An engine of an ordinary checkpoint with a tied head: no list, vLLM's own methods everywhere."""
    folder = tmp_path_factory.mktemp("plain") / "checkpoint"
    FAMILIES["qwen3_moe"](head_dim=32, tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(folder)
    engine = Engine(folder, enforce_eager=True)
    yield engine, folder
    engine.close()


def test_an_ordinary_checkpoint_takes_verified_updates_too(plain: tuple[Engine, Path]) -> None:
    engine, folder = plain
    before = engine(inside.score)
    for _ in range(2):
        report = engine(updates.update, str(folder))
        assert report["unverified"] == ()
        assert torch.equal(engine(inside.score), before)
    assert engine(inside.served_digests) == swapq.digest(folder)


def test_a_tied_head_may_be_sent_but_not_differ(plain: tuple[Engine, Path]) -> None:
    engine, folder = plain
    assert engine(faults.update_with_tied_head, str(folder), False) == "nothing"
    assert "model.embed_tokens.weight" in engine(faults.update_with_tied_head, str(folder), True)
    engine(updates.update, str(folder))


def test_an_export_of_fp32_masters_serves_what_its_bf16_copy_does(tmp_path: Path) -> None:
    model = swapq.convert(FAMILIES["qwen3_moe"](head_dim=32), "nvfp4-rl", last_layers_bf16=0)
    swapq.export(model, tmp_path / "fp32")
    swapq.export(model.to(torch.bfloat16), tmp_path / "bf16")
    scores = []
    for name in ("fp32", "bf16"):
        engine = Engine(tmp_path / name, enforce_eager=True)
        scores.append(engine(inside.score))
        engine.close()
    assert torch.equal(*scores)
