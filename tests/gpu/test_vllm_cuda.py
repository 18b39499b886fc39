"""The plugin inside a real vLLM on a CUDA device: same bits as the trainer, verified updates, scores near those of transformers."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import swapq

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
PROMPTS = [[(i * 7 + j * 3) % 60 + 3 for j in range(24)] for i in range(8)]
RECIPES = {"nvfp4-rl": {"last_layers_bf16": 1}, "mxfp8-rl": {}, "bf16": {}}
ENGINES = [
    *((recipe, True) for recipe in RECIPES),
    ("nvfp4-rl", False),
    ("mxfp8-rl", False),
]  # eager, or with CUDA graphs


def model_of(recipe: str) -> torch.nn.Module:
    from tests.helpers.models import qwen3_moe

    model = qwen3_moe(
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        moe_intermediate_size=256,
        num_experts=16,
    ).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * 0.03 if p.dim() > 1 else 1 + noise * 0.05)
    return swapq.convert(model, recipe, **RECIPES[recipe]).cuda().eval()


@pytest.fixture(scope="module", params=ENGINES, ids=lambda p: f"{p[0]}-{'eager' if p[1] else 'graphs'}")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The trainer's model and an engine that opened its export."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM

    recipe, eager = request.param
    model, folder = model_of(recipe), tmp_path_factory.mktemp(recipe)
    swapq.export(model, folder)
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=16,
        gpu_memory_utilization=0.15,
        enforce_eager=eager,
    )
    held = [recipe, model, llm, folder]
    yield held
    held.clear()  # pytest keeps what was yielded: the next engine would see this one's memory come back while it measures
    del model, llm
    gc.collect()
    torch.cuda.empty_cache()


def scores(llm: Any) -> Tensor:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0, detokenize=False)
    out = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    return torch.tensor([[next(iter(position.values())).logprob for position in o.prompt_logprobs[1:]] for o in out])


def trainer_scores(model: torch.nn.Module) -> Tensor:
    ids = torch.tensor(PROMPTS, device="cuda")
    with torch.no_grad():
        logp = model(ids).logits.float().log_softmax(-1)
    return logp[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].cpu()


def test_scores_are_near_those_of_transformers(pair: Any) -> None:
    recipe, model, llm, _ = pair
    difference = (scores(llm) - trainer_scores(model)).abs().mean().item()
    print(f"\n{recipe}: mean |log-probability difference| {difference:.5f}")
    assert difference < 0.05


@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_the_expert_block_gives_the_trainers_bits(pair: Any, tokens: int) -> None:
    recipe, model, llm, _ = pair
    if recipe == "bf16":
        pytest.skip("BF16 experts run vLLM's kernel")
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 512, generator=generator).to(torch.bfloat16).cuda()
    ids = torch.stack([torch.randperm(16, generator=generator)[:2] for _ in range(tokens)]).cuda()
    weights = torch.rand(tokens, 2, generator=generator).cuda()
    module = llm.llm_engine.model_executor.driver_worker.model_runner.model.model.layers[0].mlp.experts.routed_experts
    with torch.inference_mode():
        ours = module.quant_method.apply(module, x, weights, ids.to(torch.int32), None, None).clone()
    with torch.no_grad():
        trainers = model.model.layers[0].mlp.experts(x, ids, weights)
    assert torch.equal(ours.view(torch.int16), trainers.view(torch.int16))
    assert ours.abs().max() > 1e-3


def test_a_verified_update_with_the_same_weights_changes_nothing(pair: Any) -> None:
    from swapq.checkpoint.tensors import checkpoint_tensors
    from swapq.digest import tensor_digest
    from swapq_vllm.receiver import apply_update

    _, model, llm, _ = pair
    before = scores(llm)
    tensors = list(checkpoint_tensors(model))
    report = apply_update(llm, tensors, {n: tensor_digest(t) for n, t in tensors})
    assert report.verified == report.tensors
    assert torch.equal(scores(llm), before)


def test_an_update_with_other_weights_is_served(pair: Any, tmp_path: Path) -> None:
    from swapq.checkpoint.tensors import checkpoint_tensors
    from swapq_vllm.receiver import apply_update, served_digests

    _, model, llm, _folder = pair
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 3:
                p.mul_(1.25)
    apply_update(llm, checkpoint_tensors(model))
    assert served_digests(llm) == swapq.digest(model)
    assert (
        scores(llm) - trainer_scores(model)
    ).abs().mean() < 0.15  # louder experts of random weights, near ties in routing
