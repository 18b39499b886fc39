"""A Qwen2-MoE with a shared expert, in two sizes, and a tokenizer of printable ASCII characters.

All inner sizes are multiples of 128: groups of INT4, blocks of FP8 and the CUDA kernels fit without a rest.
"""

import dataclasses
import string

from arithmetic.model import SPECIAL, character_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen2MoeConfig, Qwen2MoeForCausalLM

__all__ = ["SIZES", "Size", "build_model", "build_tokenizer", "model_config"]

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
    """Of the shared expert."""


SIZES = {
    "tiny": Size(hidden=128, layers=4, heads=4, kv_heads=4, experts=8, chosen=2, inner=128, shared=128),
    # 12 layers: fractions of 0.15 and 0.3 are 2 and 4 of them
    "200m": Size(hidden=512, layers=12, heads=8, kv_heads=4, experts=32, chosen=4, inner=384, shared=512),
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One printable ASCII character, one token; the rest of the vocabulary is reserved."""
    tokens = [*SPECIAL, *SYMBOLS]
    reserved = [f"<reserved {i}>" for i in range(VOCABULARY - len(tokens))]
    return character_tokenizer([*tokens, *reserved], max_length=CONTEXT)


def model_config(size: str) -> Qwen2MoeConfig:
    """The configuration of one of `SIZES`. vLLM takes the head's size from the hidden size over the heads."""
    one = SIZES[size]
    return Qwen2MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=one.hidden,
        intermediate_size=one.shared,
        moe_intermediate_size=one.inner,
        shared_expert_intermediate_size=one.shared,
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
    )


def build_model(size: str) -> Qwen2MoeForCausalLM:
    """The untrained model, in float32."""
    return Qwen2MoeForCausalLM(model_config(size)).float()
