"""The expert block alone beside vLLM's BF16 fused_moe, as CUDA graphs, weights in rotation so that no cache holds them."""

from collections.abc import Iterator

import torch

import swapq
from benchmarks.hopper.timing import Row, copy_bandwidth, graphed
from swapq import formats
from swapq.kernels import fast
from swapq.nn.gate import activation_table

E, H, INNER, TOP, SETS = 128, 2048, 768, 8, 3


def rows() -> Iterator[Row]:
    from vllm.model_executor.layers.fused_moe import fused_experts

    copy, table = copy_bandwidth(), activation_table("silu", torch.device("cuda"))
    weights = [
        [torch.randn(E, *s, device="cuda", dtype=torch.bfloat16) * 0.02 for s in ((2 * INNER, H), (H, INNER))]
        for _ in range(SETS)
    ]
    for fmt in ("nvfp4", "mxfp8", "fp8_block", "int4"):
        stored = [[formats.get(fmt).stored(swapq.quantize(w, fmt).parts) for w in pair] for pair in weights]
        size = sum(t.numel() * t.element_size() for parts in stored[0] for t in parts if t is not None) / E
        for tokens in (1, 16, 64, 256, 1024):
            x = torch.randn(tokens, H, device="cuda", dtype=torch.bfloat16)
            routed, ids = torch.topk(torch.rand(tokens, E, device="cuda").softmax(-1), TOP)
            ids = ids.to(torch.int32)

            def ours(x=x, ids=ids, routed=routed, stored=stored, fmt=fmt) -> None:
                for up, down in stored:
                    fast.stored_block(x, ids, routed, up, down, fmt, table)

            def theirs(x=x, ids=ids, routed=routed) -> None:
                for up, down in weights:
                    fused_experts(x, up, down, routed, ids)

            mine, bf16 = graphed(ours) / SETS, graphed(theirs) / SETS
            least = size * len(ids.unique()) / copy
            target = {16: 0.45, 64: 0.45, 256: 0.45}.get(tokens) if fmt == "nvfp4" else None
            yield Row(
                f"expert block {tokens} tokens, {fmt}", mine, bf16, "us", mine / bf16, f"<= {target}" if target else "-",
                target is None or mine / bf16 <= target, f"{least / mine:.2f} of the memory roofline ({least:.0f} us)",
            )  # fmt: skip
