"""A worker of an engine of several ranks that shows its part: of the expert block, and of every tensor of the checkpoint."""

from typing import Any

import torch
from torch import Tensor

from swapq_vllm.placement import Layouts
from swapq_vllm.served import Served
from tests.vllm.stacked_worker import StackedWorker

__all__ = ["RankedWorker", "assembled", "routed_tokens"]

#: a part of a checkpoint tensor: sizes, strides and offset in elements, and its bytes
Part = tuple[tuple[int, ...], tuple[int, ...], int, bytes]


def routed_tokens(tokens: int, hidden: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """BF16 rows ``[T, H]``, two different expert ids ``[T, 2]`` and their weights, the same in every process."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(tokens)])
    return x, ids, torch.rand(tokens, 2, generator=generator)


class RankedWorker(StackedWorker):
    """vLLM mixes this into its worker."""

    def partial_block(self, tokens: int) -> tuple[list[int], bytes]:
        """Global numbers of the experts that this rank holds a part of, and the bits of what they add to the first layer's block."""
        served = Served.of(self)
        stack = next(iter(served.stacks.values()))
        layer: Any = stack.layer
        hidden = served.worker.model_runner.model_config.get_hidden_size()
        x, ids, weights = (t.to(served.worker.device) for t in routed_tokens(tokens, hidden, stack.shard.total))
        with torch.inference_mode():
            out = layer.quant_method.apply(layer, x, weights, ids.to(torch.int32), None, None)
        return list(stack.shard.experts), out.cpu().view(torch.int16).numpy().tobytes()

    def held_parts(self) -> dict[str, tuple[str, tuple[int, ...], list[Part]]]:
        """Checkpoint name -> dtype, shape and the parts that this rank holds."""
        layouts, found = Layouts(), {}
        for name, placement in Served.of(self).placements.items():
            parts: list[Part] = []
            for piece in placement.pieces:
                held = piece.held(layouts)
                if held is None or piece.source is None:
                    raise AssertionError(f"{name}: {piece.name} cannot be read back")
                raw = held.detach().to(placement.meta.dtype).contiguous().cpu().reshape(-1).view(torch.uint8)
                parts.append((*piece.source, raw.numpy().tobytes()))
            found[name] = (str(placement.meta.dtype).removeprefix("torch."), placement.meta.shape, parts)
        return found


def assembled(ranks: list[dict[str, tuple[str, tuple[int, ...], list[Part]]]]) -> dict[str, Tensor]:
    """The checkpoint's tensors put together from what all ranks hold.

    Raises:
        AssertionError: ranks hold different bytes of one element, or none holds it.
    """
    whole: dict[str, Tensor] = {}
    for name, (dtype_name, shape, _) in ranks[0].items():
        dtype: torch.dtype = getattr(torch, dtype_name)
        wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]  # not every dtype can be compared
        out, seen = torch.zeros(shape, dtype=wide), torch.zeros(shape, dtype=torch.bool)
        for rank, held in enumerate(ranks):
            for sizes, strides, offset, raw in held[name][2]:
                part = torch.frombuffer(bytearray(raw), dtype=wide).reshape(sizes)
                into, known = (t.as_strided(sizes, strides, offset) for t in (out, seen))
                assert not bool(((into != part) & known).any()), (
                    f"{name}: rank {rank} holds other bytes than those before it"
                )
                into.copy_(part)
                known.fill_(True)
        assert bool(seen.all()), f"{name}: {int((~seen).sum())} of {seen.numel()} elements are on no rank"
        whole[name] = out.view(dtype)
    return whole
