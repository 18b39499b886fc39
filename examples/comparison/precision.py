"""Which parts of a model should stay in BF16: the first layer, the last layers, the shared experts. Measured, not trained.

Every cell converts one supervised 12-layer model with shared experts and compares its answers with those of the BF16 model. The 4
layers of the main job's model could not tell a fraction of 0.15 from one of 0.3, and it has no shared experts.
"""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import torch
from arithmetic.model import build_tokenizer, model_config
from arithmetic.task import all_sums
from arithmetic.warmup import Warmup, encode, teach
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM, set_seed

import swapq

__all__ = ["FACTORS", "measure"]

LAYERS = 12
FACTORS: dict[str, tuple[Any, ...]] = {
    "recipe": ("nvfp4-rl", "mxfp8-rl"),
    "last": (0, 0.15, 0.3),
    "first": (0, 1),
    "shared": ("bf16", "quantized"),
}
_FORMAT = {"nvfp4-rl": "nvfp4", "mxfp8-rl": "mxfp8"}


def measure(path: Path, seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    """One row for each cell and seed (of the supervised start), kept in `path`; what it holds already is not measured again."""
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    for seed in seeds:
        if any(row["seed"] == seed for row in rows):
            continue
        state = _supervised(seed).state_dict()
        rows += [{"seed": seed, **cell, **_compare(state, cell)} for cell in _cells()]
        staging = path.with_suffix(".part")
        path.parent.mkdir(parents=True, exist_ok=True)
        staging.write_text(json.dumps(rows), encoding="utf-8")
        os.replace(staging, path)
        print(f"precision, seed {seed}: {len(_cells())} converted models measured", flush=True)
    return rows


def _cells() -> list[dict[str, Any]]:
    return [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]


def _build() -> Qwen2MoeForCausalLM:
    """12 layers of hidden size 64: 8 experts of 32, top 2, and a shared expert of 64."""
    shape = model_config()
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            vocab_size=shape.vocab_size,
            hidden_size=64,
            intermediate_size=128,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_experts=8,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            router_aux_loss_coef=0.0,
            pad_token_id=shape.pad_token_id,
            eos_token_id=shape.eos_token_id,
            bos_token_id=None,
        )
    )


def _supervised(seed: int) -> Qwen2MoeForCausalLM:
    set_seed(seed)
    model = _build().float()
    teach(model, build_tokenizer(), Warmup(seed=seed), quiet=True)
    return model.to(torch.bfloat16)


def _compare(state: dict[str, torch.Tensor], cell: dict[str, Any]) -> dict[str, Any]:
    """KL(BF16 || converted) in nats per answer token, over every sum of the task, and the bytes of the weights."""
    recipe = swapq.Recipe.named(cell["recipe"], last_layers_bf16=cell["last"], first_layers_bf16=cell["first"])
    weights = {role: fmt for role, fmt in recipe.weights.items() if role != "shared_experts"}
    if cell["shared"] == "quantized":
        weights["shared_experts"] = _FORMAT[cell["recipe"]]
    recipe = recipe.replace(weights=weights)
    model = _build().to(torch.bfloat16).eval()
    model.load_state_dict(state)
    ids, labels = encode(build_tokenizer(), all_sums())
    expected = _log_probabilities(model, ids, labels)
    plan = swapq.plan(model, recipe)
    swapq.convert(model, recipe)
    found = _log_probabilities(model, ids, labels)
    kl = (expected.exp() * (expected - found)).sum(-1)
    return {
        "kl": kl.mean().item(),
        "kl_p99": kl.quantile(0.99).item(),
        "bytes": sum(entry.bytes_after for entry in plan),
        "bytes_bf16": sum(entry.bytes_before for entry in plan),
    }


def _log_probabilities(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(answer tokens, vocabulary): the distributions that the answers' tokens, end included, are drawn from."""
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=(ids != 0).long()).logits.float()
    return logits[:, :-1][labels[:, 1:] >= 0].log_softmax(-1)
