"""The live engine serves the checkpoint's bytes, computes what the trainer computes, and stays right across updates."""

import pytest
import torch
from safetensors.torch import load_file

import swapq
from tests.vllm import inside, updates
from tests.vllm.conftest import LINEARS, RECIPES, Exports, tiny
from tests.vllm.engine import Engine

pytestmark = [pytest.mark.vllm, pytest.mark.parametrize("recipe", list(RECIPES), indirect=True, scope="session")]


def test_it_loads_by_its_config_alone_and_generates(engine: Engine) -> None:
    completions = engine(inside.generate)
    assert [len(c) for c in completions] == [8] * len(inside.PROMPTS)
    assert engine(inside.score).isfinite().all()


def test_each_layer_runs_what_the_list_says(engine: Engine, recipe: str) -> None:
    methods = engine(inside.methods)
    experts = [methods[f"model.layers.{i}.mlp.experts.routed_experts"] for i in range(2)]
    attention = [methods[f"model.layers.{i}.self_attn.qkv_proj"] for i in range(2)]
    quantized = "Bf16ExpertsMethod" if recipe == "bf16" else "SwapqExpertsMethod"
    assert experts == [quantized, "Bf16ExpertsMethod"]
    assert attention == ["SwapqLinearMethod" if recipe in LINEARS else "Bf16LinearMethod", "Bf16LinearMethod"]
    assert methods["model.layers.0.mlp.gate"] == "Bf16LinearMethod"
    assert methods["lm_head"] == "Bf16EmbeddingMethod"


def test_it_serves_every_tensor_of_the_checkpoint(engine: Engine, exports: Exports, recipe: str) -> None:
    served, saved = engine(inside.served), load_file(exports(recipe) / "model.safetensors")
    assert served.keys() == saved.keys()
    for name, tensor in saved.items():
        assert served[name].dtype == tensor.dtype
        assert torch.equal(served[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_its_digests_are_those_of_the_folder(engine: Engine, exports: Exports, recipe: str) -> None:
    assert engine(inside.served_digests) == swapq.digest(exports(recipe))


@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_its_expert_block_gives_the_trainers_bits(engine: Engine, recipe: str, tokens: int) -> None:
    if recipe == "bf16":
        pytest.skip("BF16 experts run vLLM's kernel")
    model = swapq.convert(tiny(), recipe, **RECIPES[recipe])
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 64, generator=generator).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2, generator=generator)
    ours = engine(inside.experts, 0, x, ids, weights)
    with torch.no_grad():
        trainers = model.model.layers[0].mlp.experts(x, ids, weights)
    assert torch.equal(ours.view(torch.int16), trainers.view(torch.int16))
    assert ours.abs().max() > 0.01
    alone = engine(inside.experts, 0, x[-1:], ids[-1:], weights[-1:])
    assert torch.equal(alone[0], ours[-1]), "a row depends on its neighbours"


def test_its_linears_give_the_trainers_bits(engine: Engine, recipe: str) -> None:
    if recipe not in LINEARS:
        pytest.skip("the recipe quantizes experts only")
    model = swapq.convert(tiny(), recipe, **RECIPES[recipe])
    attention = model.model.layers[0].self_attn
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    with torch.no_grad():
        merged = torch.cat([attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)], dim=-1)
        row_parallel = attention.o_proj(merged[:, :128])
    assert torch.equal(engine(inside.linear, "model.layers.0.self_attn.qkv_proj", x), merged)
    assert torch.equal(engine(inside.linear, "model.layers.0.self_attn.o_proj", merged[:, :128]), row_parallel)


def test_the_same_weights_again_change_nothing(engine: Engine, exports: Exports, recipe: str) -> None:
    before = engine(inside.score)
    report = engine(updates.update, str(exports(recipe)))
    assert torch.equal(engine(inside.score), before)
    assert report["verified"] == report["tensors"] == len(swapq.digest(exports(recipe)))
    assert report["unverified"] == ()


def test_four_updates_end_where_they_began(engine: Engine, exports: Exports, recipe: str) -> None:
    first = str(exports(recipe))
    start, places = engine(updates.update_and_score, first), engine(inside.addresses)
    memory = engine(inside.tensor_bytes)
    for seed in (1, 2, 3):
        other = engine(updates.update_and_score, str(exports(recipe, seed)))
        assert not torch.equal(other, start)
        assert engine(inside.served_digests) == swapq.digest(exports(recipe, seed))
    assert torch.equal(engine(updates.update_and_score, first), start)
    assert engine(inside.addresses) == places
    assert engine(inside.tensor_bytes) == memory


def test_a_sender_may_reuse_its_buffer(engine: Engine, exports: Exports, recipe: str) -> None:
    assert engine(updates.update_from_one_buffer, str(exports(recipe))) == swapq.digest(exports(recipe))


def test_uninitialized_memory_reaches_no_weight(engine: Engine, exports: Exports, recipe: str) -> None:
    start = engine(updates.update_and_score, str(exports(recipe)))
    assert torch.equal(engine(updates.update_with_poisoned_memory, str(exports(recipe))), start)


def test_a_servers_worker_is_checked_by_digests(engine: Engine, exports: Exports, recipe: str) -> None:
    folder, name = str(exports(recipe)), "model.layers.0.mlp.experts.3.up_proj.weight"
    counts, state = engine(inside.verify, folder, None)
    assert counts == {"equal": len(swapq.digest(folder)), "wrong": 0, "unreadable": 0, "unsent": 0, "unknown": 0}
    assert state == "serves"
    counts, state = engine(inside.verify, folder, name)
    assert (counts["wrong"], counts["equal"]) == (1, len(swapq.digest(folder)) - 1)
    assert name in state
    assert engine(inside.verify, folder, None)[1] == "serves"
