"""A Qwen2-MoE with a shared expert, or a Qwen3-MoE without, and a tokenizer of printable ASCII characters.

All inner sizes are multiples of 128: groups of INT4, blocks of FP8 and the CUDA kernels fit without a rest.
"""

import dataclasses
import string

import torch
from arithmetic.model import SPECIAL, character_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2MoeConfig, Qwen3MoeConfig

__all__ = ["SIZES", "Size", "build_model", "build_tokenizer", "family", "model_config"]

VOCABULARY = 128
CONTEXT = 128
SYMBOLS = " " + string.digits + string.ascii_letters + string.punctuation


@dataclasses.dataclass(frozen=True)
class Size:
    """What differs between the sizes."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    experts: int
    chosen: int
    inner: int
    """Of a routed expert."""
    shared: int
    """Of the shared expert; 0 is none, and then the model is a Qwen3-MoE."""


SIZES = {
    "tiny": Size(hidden=128, layers=4, heads=4, kv_heads=4, experts=8, chosen=2, inner=128, shared=128),
    # 12 layers: fractions of 0.15 and 0.3 are 2 and 4 of them
    "200m": Size(hidden=512, layers=12, heads=8, kv_heads=4, experts=32, chosen=4, inner=384, shared=512),
    "200m-unshared": Size(hidden=512, layers=12, heads=8, kv_heads=4, experts=32, chosen=4, inner=384, shared=0),
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One printable ASCII character, one token; the rest of the vocabulary is reserved."""
    tokens = [*SPECIAL, *SYMBOLS]
    reserved = [f"<reserved {i}>" for i in range(VOCABULARY - len(tokens))]
    return character_tokenizer([*tokens, *reserved], max_length=CONTEXT)


def model_config(size: str) -> Qwen2MoeConfig | Qwen3MoeConfig:
    """The configuration of one of `SIZES`."""
    one = SIZES[size]
    head = one.hidden // one.heads  # vLLM derives a Qwen2-MoE's from these two
    config, own = Qwen3MoeConfig, {"head_dim": head, "intermediate_size": one.inner}
    if one.shared:
        config, own = Qwen2MoeConfig, {"shared_expert_intermediate_size": one.shared, "intermediate_size": one.shared}
    return config(
        vocab_size=VOCABULARY,
        hidden_size=one.hidden,
        moe_intermediate_size=one.inner,
        num_hidden_layers=one.layers,
        num_attention_heads=one.heads,
        num_key_value_heads=one.kv_heads,
        num_experts=one.experts,
        num_experts_per_tok=one.chosen,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        router_aux_loss_coef=0.0,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **own,
    )


def family(size: str) -> str:
    """What the model is, in words."""
    return "a Qwen2-MoE with a shared expert" if SIZES[size].shared else "a Qwen3-MoE"


def build_model(size: str) -> PreTrainedModel:
    """The untrained model, in float32."""
    return AutoModelForCausalLM.from_config(model_config(size), dtype=torch.float32)
