"""The experts that a real vLLM returns on a CUDA device, with CUDA graphs: their shape, and what replaying them does to the mismatch."""

import gc
import os
from typing import Any

import pytest
import torch
from torch import Tensor

import swapq
from tests.trl.conftest import job  # noqa: F401  a fixture

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SHARED = [(j * 5) % 60 + 3 for j in range(32)]  # two blocks of the prefix cache
PROMPTS = [SHARED + [(i * 7 + j * 3) % 60 + 3 for j in range(2 + i)] for i in range(16)]
RECIPES = {"nvfp4-rl": {"last_layers_bf16": 1}, "mxfp8-rl": {}, "bf16": {}}
LAYERS, TOP_K = 3, 2


def near_ties(recipe: str) -> torch.nn.Module:
    """Routers that hardly prefer any of 16 experts, in the middle one of three layers none at all: that one is dense."""
    from tests.helpers.models import qwen3_moe

    model = qwen3_moe(
        hidden_size=512,
        num_hidden_layers=LAYERS,
        mlp_only_layers=[1],
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_experts=16,
        num_experts_per_tok=TOP_K,
    ).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * (0.001 if ".gate.weight" in name else 0.05) if p.dim() > 1 else 1 + noise * 0.05)
    return swapq.convert(model, recipe, **RECIPES[recipe]).cuda().eval()


@pytest.fixture(scope="module", params=RECIPES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The trainer's model and an engine that opened its export and returns experts."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM

    model, folder = near_ties(request.param), tmp_path_factory.mktemp(request.param)
    swapq.export(model, folder)
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=16,
        gpu_memory_utilization=0.15,
        enforce_eager=False,
        enable_return_routed_experts=True,
        logprobs_mode="processed_logprobs",
    )
    held = [request.param, model, llm]
    yield held
    held.clear()  # pytest keeps what was yielded: the next engine would see this one's memory come back while it measures
    del model, llm
    gc.collect()
    torch.cuda.empty_cache()


def generated(llm: Any, tokens: int = 40) -> list[Any]:
    from vllm import SamplingParams

    parameters = SamplingParams(
        max_tokens=tokens, min_tokens=min(3, tokens), temperature=1.0, seed=0, logprobs=0, detokenize=False
    )
    return llm.generate([{"prompt_token_ids": p} for p in PROMPTS], parameters, use_tqdm=False)


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_row_of_experts_comes_for_every_token_but_the_last(pair: Any, tokens: int) -> None:
    _, _, llm = pair
    for output in generated(llm, tokens):
        (completion,) = output.outputs
        rows = len(output.prompt_token_ids) + len(completion.token_ids) - 1
        experts = torch.from_numpy(completion.routed_experts.astype("int64"))
        assert completion.routed_experts.dtype.name == "uint8"
        assert experts.shape == (rows, LAYERS, TOP_K)
        for layer in (0, 2):
            assert (experts[:, layer, 0] != experts[:, layer, 1]).all()
            assert experts[:, layer].max() < 16
        assert not experts[:, 1].any()  # the dense layer


def test_tokens_from_the_prefix_cache_come_with_the_experts_they_had(pair: Any) -> None:
    _, _, llm = pair
    llm.reset_prefix_cache()
    first = generated(llm, 3)
    second = generated(llm, 3)
    assert all(output.num_cached_tokens >= len(SHARED) for output in second)
    for before, after in zip(first, second, strict=True):
        kept = after.num_cached_tokens
        assert (before.outputs[0].routed_experts[:kept] == after.outputs[0].routed_experts[:kept]).all()


def batch(outputs: list[Any]) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Ids, mask and the engine's log-probabilities as TRL lays them out, and the experts."""
    from swapq_trl.replay import RoutedSequence, padded

    sequences = [RoutedSequence.of(output) for output in outputs]
    left = max(s.prompt for s in sequences)
    right = max(len(s.ids) - s.prompt for s in sequences)
    ids = torch.zeros(len(sequences), left + right, dtype=torch.long)
    mask, logps = torch.zeros_like(ids), torch.zeros(len(sequences), right)
    for i, (sequence, output) in enumerate(zip(sequences, outputs, strict=True)):
        at = slice(left - sequence.prompt, left - sequence.prompt + len(sequence.ids))
        ids[i, at], mask[i, at] = torch.tensor(sequence.ids), 1
        sampled = zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        values = [position[token].logprob for token, position in sampled]
        logps[i, : len(values)] = torch.tensor(values)
    return ids, mask, logps, padded(sequences, ids, mask, right), right


def test_replayed_experts_do_not_enlarge_the_mismatch(pair: Any) -> None:
    recipe, model, llm = pair
    ids, mask, rollout, experts, right = batch(generated(llm))

    def difference() -> float:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(ids.cuda(), attention_mask=mask.cuda(), position_ids=positions.cuda()).logits[:, :-1].float()
        scored = logits.log_softmax(-1).gather(-1, ids[:, 1:, None].cuda())[..., 0][:, -right:].cpu()
        return (scored - rollout).abs()[mask[:, -right:] == 1].mean().item()

    without = difference()
    with swapq.replay_routing(model, experts.flatten(0, 1).transpose(0, 1)) as routing:
        replayed = difference()
    changed = routing.changed_fraction
    print(
        f"\n{recipe}: mean |difference| {without:.5f} without, {replayed:.5f} with replay; {changed:.4f} of the choices differ"
    )
    assert changed < 0.5  # the engine's experts belong to these tokens and layers: chance alone would agree on 1 %
    assert replayed <= without


@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "sleep mode"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_grpo_trainer_replays_what_its_engine_returns(job: Any, recipe: str, sleeps: bool) -> None:  # noqa: F811
    options = {"steps": 2, "engine_options": {}, "vllm_enable_sleep_mode": sleeps}
    without = job("replay_jobs.on_near_ties", recipe=recipe, **options)["history"]
    replayed = job("replay_jobs.on_near_ties", recipe=recipe, replay_routing=True, **options)["history"]
    figures = [[row["swapq/mismatch_abs_mean"] for row in rows] for rows in (without, replayed)]
    changed = [row["swapq/replay_changed_fraction"] for row in replayed]
    print(
        f"\n{recipe}: mismatch by step {figures[0]} without, {figures[1]} with replay; {changed} of the choices differ"
    )
    assert all(fraction < 0.5 for fraction in changed)
    assert figures[1][0] <= 1.1 * figures[0][0]  # other samples in the two runs
