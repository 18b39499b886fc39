"""A recipe of two formats in the engine: NVFP4 experts beside MXFP8 attention, dense and shared layers, with the trainer's bits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

import swapq
from swapq.diagnostics import audit
from tests.helpers.mixed import mixed
from tests.helpers.models import deepseek_v3
from tests.vllm import inside, updates
from tests.vllm.engine import Engine
from tests.vllm.test_vllm_families import SIZES

pytestmark = pytest.mark.vllm


def converted() -> PreTrainedModel:
    return swapq.convert(deepseek_v3(**SIZES["deepseek_v3"]).to(torch.bfloat16), mixed("deepseek_v3"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed") / "export"
    swapq.export(converted(), folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = Engine(folder, enforce_eager=True)
    yield engine
    engine.close()


def test_each_layer_runs_its_own_format(engine: Engine) -> None:
    methods, formats = engine(inside.methods), engine(inside.running)
    assert methods["model.layers.1.mlp.experts.routed_experts"] == "SwapqExpertsMethod"
    assert formats["model.layers.1.mlp.experts.3.down_proj.weight"] == ("nvfp4", "nvfp4")
    for layer in ("0.mlp.up_proj", "1.mlp.shared_experts.down_proj", "1.self_attn.q_a_proj"):
        assert formats[f"model.layers.{layer}.weight"] == ("mxfp8", "mxfp8")
    for layer in ("model.layers.1.mlp.gate", "model.layers.1.self_attn.kv_b_proj", "lm_head"):
        assert formats[f"{layer}.weight"] == ("bf16", "bf16")


def test_an_audit_finds_nothing_or_exactly_the_layer_that_differs(engine: Engine, folder: Path) -> None:
    model, runs = converted(), engine(inside.running)
    assert audit(model, runs) == audit(folder, runs) == audit(model, folder) == {}
    shared = "model.layers.1.mlp.shared_experts.down_proj"
    found = audit(model, engine(inside.running_with_bf16_rows, shared))
    assert found == {f"{shared}.weight": (("mxfp8", "mxfp8"), ("mxfp8", "bf16"))}
    other = swapq.convert(
        deepseek_v3(**SIZES["deepseek_v3"]), mixed("deepseek_v3", keep_bf16=["layers.0.self_attn.o_proj"])
    )
    assert list(audit(other, runs)) == ["model.layers.0.self_attn.o_proj.weight"]


def test_it_serves_every_tensor_of_the_export(engine: Engine, folder: Path) -> None:
    served, saved = engine(inside.served), load_file(folder / "model.safetensors")
    assert served.keys() == saved.keys()
    assert engine(inside.served_digests) == swapq.digest(folder) == swapq.digest(converted())


def test_its_experts_and_its_linears_give_the_trainers_bits(engine: Engine) -> None:
    layers, generator = converted().model.layers, torch.Generator().manual_seed(1)
    x = torch.randn(9, 64, generator=generator).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(9)])
    weights = torch.rand(9, 2, generator=generator)
    with torch.no_grad():
        experts = layers[1].mlp.experts(x, ids, weights)
        shared, dense = layers[1].mlp.shared_experts, layers[0].mlp
        linears = {
            "1.mlp.shared_experts.gate_up_proj": torch.cat([shared.gate_proj(x), shared.up_proj(x)], -1),
            "0.mlp.gate_up_proj": torch.cat([dense.gate_proj(x), dense.up_proj(x)], -1),
            "1.self_attn.fused_qkv_a_proj": torch.cat(
                [layers[1].self_attn.q_a_proj(x), layers[1].self_attn.kv_a_proj_with_mqa(x)], -1
            ),
        }
    assert torch.equal(engine(inside.experts, 1, x, ids, weights), experts)
    for name, expected in linears.items():
        assert torch.equal(engine(inside.linear, f"model.layers.{name}", x), expected), name


def test_an_update_of_both_formats_is_verified_and_changes_nothing(engine: Engine, folder: Path) -> None:
    before = engine(inside.score)
    assert before.isfinite().all()
    report = engine(updates.update, str(folder))
    assert report["verified"] == report["tensors"] == len(swapq.digest(folder))
    assert report["unverified"] == ()
    assert torch.equal(engine(inside.score), before)
