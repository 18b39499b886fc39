"""A recipe of two formats, and tiny models that have every role it names."""

import swapq

#: routed experts in 4 bits, everything else that can be quantized in 8
WEIGHTS = {"routed_experts": "nvfp4", "shared_experts": "mxfp8", "dense_mlp": "mxfp8", "attention": "mxfp8"}
#: family -> layers at the end that stay BF16 (deepseek_v3 has one dense and one MoE layer, both wanted)
FAMILIES = {"qwen3_moe": 1, "deepseek_v3": 0}


def mixed(family: str = "qwen3_moe", **changes: object) -> swapq.Recipe:
    """The recipe for a tiny model of ``family``."""
    fields = {"name": "mixed", "weights": WEIGHTS, "activations": WEIGHTS, "backward": "dequantized"}
    return swapq.Recipe.from_dict(fields | {"last_layers_bf16": FAMILIES[family]} | changes)
