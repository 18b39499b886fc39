"""The named recipes, as fields, and what each is for in a sentence."""

from collections.abc import Mapping
from typing import Any

from swapq.anatomy.role import QUANTIZABLE, Role

__all__ = ["NAMED", "NOTES"]

_EXPERTS = Role.routed_experts.value


def _everywhere(fmt: str) -> dict[str, str]:
    return {role.value: fmt for role in QUANTIZABLE}


NAMED: Mapping[str, Mapping[str, Any]] = {
    "bf16": {},
    "mxfp8-rl": {"weights": _everywhere("mxfp8"), "activations": "mxfp8", "backward": "low_precision"},
    "nvfp4-rl": {
        "weights": {_EXPERTS: "nvfp4"},
        "activations": "nvfp4",
        "backward": "dequantized",
        "last_layers_bf16": 0.15,
    },
    "fp8-block-rl": {"weights": _everywhere("fp8_block"), "activations": "fp8_block", "backward": "low_precision"},
    "fp8-rollout": {"weights": _everywhere("fp8_block"), "activations": "fp8_block", "backward": "bf16"},
    "int4-qat": {"weights": {_EXPERTS: "int4"}, "activations": "bf16", "backward": "dequantized"},
    "nvfp4-pretrain": {
        "weights": {_EXPERTS: "nvfp4_tile"},
        "activations": "nvfp4_tile",
        "backward": "low_precision",
        "last_layers_bf16": 0.15,
    },
}

NOTES: Mapping[str, str] = {
    "bf16": "the control",
    "mxfp8-rl": "one policy, end to end in 8 bits",
    "nvfp4-rl": "one policy, experts in 4 bits with one scale per token",
    "fp8-block-rl": "one policy, Hopper-era blocks of 128x128 and 1x128",
    "fp8-rollout": "TWO POLICIES: training in BF16, rollout in FP8 blocks; the mismatch is measured",
    "int4-qat": "one policy, experts fake-quantized (straight-through) in training, W4A16 in rollout",
    "nvfp4-pretrain": "not for RL: a row depends on its batch; gradients in 4 bits, drawn, after a Hadamard transform",
}
