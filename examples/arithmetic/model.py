"""The tiny Qwen3-MoE of the demonstration and its tokenizer of 64 single characters."""

import string
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

SPECIAL = ["<pad>", "<eos>", "<unk>"]
SYMBOLS = string.digits + "+-*/=() .,:?" + string.ascii_letters
VOCABULARY = 64


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that reads one character as one token."""
    return character_tokenizer([*SPECIAL, *SYMBOLS][:VOCABULARY], max_length=64)


def character_tokenizer(tokens: Sequence[str], *, max_length: int) -> PreTrainedTokenizerFast:
    """One character, one token: `tokens` in the order of their ids, those of `SPECIAL` among them."""
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def model_config() -> Qwen3MoeConfig:
    """4 layers, hidden size 128, 8 experts of 64, top 2: about a million parameters."""
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        router_aux_loss_coef=0.0,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def build_model() -> Qwen3MoeForCausalLM:
    """The untrained model, in float32."""
    return Qwen3MoeForCausalLM(model_config()).float()
