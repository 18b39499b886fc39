"""Tiny models of real families, made in a second."""

import functools

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    NemotronHConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def qwen3_moe(**overrides: object) -> PreTrainedModel:
    options = SIZES | {
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    }
    return _make(Qwen3MoeConfig(**(options | overrides)))


def qwen2_moe(**overrides: object) -> PreTrainedModel:
    options = SIZES | {
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
    }
    return _make(Qwen2MoeConfig(**(options | overrides)))


def mixtral(**overrides: object) -> PreTrainedModel:
    options = SIZES | {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    return _make(MixtralConfig(**(options | overrides)))


def deepseek_v3(**overrides: object) -> PreTrainedModel:
    options = {k: v for k, v in SIZES.items() if k != "head_dim"} | {
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 32,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    }
    return _make(DeepseekV3Config(**(options | overrides)))


def gpt_oss(**overrides: object) -> PreTrainedModel:
    options = SIZES | {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    return _make(GptOssConfig(**(options | overrides)))


def nemotron_h(**overrides: object) -> PreTrainedModel:
    options = SIZES | {
        "intermediate_size": 96,
        "layers_block_type": ["attention", "moe"],
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "moe_latent_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }
    options.pop("num_hidden_layers")
    return _make(NemotronHConfig(**(options | overrides)))


FAMILIES = {f.__name__: f for f in (qwen3_moe, qwen2_moe, mixtral, deepseek_v3, gpt_oss, nemotron_h)}


def _make(config: object) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
            elif parameter.ndim == 1 and parameter.abs().sum() == 0:
                parameter.normal_(0, 0.02)  # biases and correction biases that would hide a mistake at zero
    return model.eval()


@functools.cache
def prompts(rows: int = 3, length: int = 12) -> Tensor:
    """Token ids ``[rows, length]``."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))
