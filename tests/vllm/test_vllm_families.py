"""Other MoE families load, serve every byte of their checkpoint, and take an update: merged, shared and MLA layers included."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import swapq
from tests.helpers.models import FAMILIES
from tests.vllm import inside
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


@pytest.fixture(scope="module", params=[(f, r) for f in SIZES for r in ("nvfp4-rl", "mxfp8-rl")], ids="-".join)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
    family, recipe = request.param
    model = FAMILIES[family](**SIZES[family]).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp(family) / recipe
    swapq.export(swapq.convert(model, recipe, last_layers_bf16=0), folder)
    engine = Engine(folder, enforce_eager=True)
    yield engine, folder
    engine.close()


def test_it_serves_the_folder_and_takes_it_again(served: tuple[Engine, Path]) -> None:
    engine, folder = served
    assert "SwapqExpertsMethod" in engine(inside.methods).values()
    assert engine(inside.served_digests) == swapq.digest(folder)
    before = engine(inside.score)
    assert before.isfinite().all()
    report = engine(inside.update, str(folder))
    assert report["verified"] == len(swapq.digest(folder))
    assert torch.equal(engine(inside.score), before)
