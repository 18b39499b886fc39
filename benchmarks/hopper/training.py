"""MoE block forward and backward beside the same block in BF16 (transformers' grouped_mm experts): time and peak memory."""

from collections.abc import Iterator

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import swapq
from benchmarks.hopper.timing import Row, microseconds

_MODES = {
    "nvfp4-rl": ("high_precision", "dequantized"),
    "mxfp8-rl": ("low_precision", "high_precision", "dequantized"),
    "fp8-block-rl": ("low_precision", "high_precision", "dequantized"),
    "int4-qat": ("dequantized",),
}


def experts(recipe: str | None, backward: str | None = None) -> torch.nn.Module:
    """One layer's experts of Qwen3-30B-A3B's shape, BF16 or converted."""
    config = Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, num_hidden_layers=1, vocab_size=64,
        num_attention_heads=4, num_key_value_heads=4, head_dim=64, experts_implementation="grouped_mm",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    if recipe:
        swapq.convert(model, recipe, backward=backward, last_layers_bf16=0)
    return model.model.layers[0].mlp.experts


def step(block: torch.nn.Module, tokens: int) -> tuple[float, float]:
    """Microseconds and peak bytes above the parameters of one forward and backward."""
    torch.manual_seed(1)
    x = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scores = torch.rand(tokens, 128, device="cuda")
    weights, ids = torch.topk(scores.softmax(-1), 8)
    weights = weights.to(torch.bfloat16).requires_grad_()
    dy = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16)

    def once() -> None:
        for t in (x, weights, *block.parameters()):
            t.grad = None
        block(x, ids, weights).backward(dy)

    once()
    for t in (x, weights, *block.parameters()):
        t.grad = None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    once()
    peak = torch.cuda.max_memory_allocated() - before
    return microseconds(once, 6, 2), peak


def rows() -> Iterator[Row]:
    block = experts(None)
    sizes = {32768: 1.10, 8192: 1.25}
    base = {tokens: step(block, tokens) for tokens in sizes}
    del block
    for recipe, modes in _MODES.items():
        for mode in modes:
            block = experts(recipe, mode)
            for tokens, target in sizes.items():
                time, peak = step(block, tokens)
                ratio = time / base[tokens][0]
                note = f"peak {peak / 1e9:.2f} GB, BF16 {base[tokens][1] / 1e9:.2f} GB"
                yield Row(
                    f"block fwd+bwd {tokens} tokens, {recipe} {mode}", time / 1e3, base[tokens][0] / 1e3, "ms", ratio,
                    f"<= {target}", ratio <= target, note,
                )  # fmt: skip
            del block
            torch.cuda.empty_cache()
