"""Updates that run in the engine's process, and what they leave behind; the first argument is the engine."""

from typing import Any

import torch
from torch import Tensor

from tests.vllm import inside
from tests.vllm.stack import stacked


def update(llm: Any, directory: str) -> Any:
    """One verified update with the tensors of a checkpoint; the report as a dictionary."""
    import dataclasses

    from swapq.digest import tensor_digest
    from swapq_vllm.receiver import apply_update

    weights = inside.weights(directory)
    return dataclasses.asdict(apply_update(llm, weights.items(), {n: tensor_digest(t) for n, t in weights.items()}))


def stacked_update(llm: Any, directory: str) -> Any:
    """One verified update whose quantized experts come as stacks; the report, and the names of the stacks."""
    import dataclasses

    from swapq.digest import tensor_digest
    from swapq_vllm.receiver import apply_update

    weights = stacked(inside.weights(directory), llm)
    report = apply_update(llm, weights.items(), {n: tensor_digest(t) for n, t in weights.items()})
    return dataclasses.asdict(report), sorted(
        n for n in weights if "_proj." in n and ".experts." in n and "experts." in n
    )


def stacked_update_and_score(llm: Any, directory: str) -> Tensor:
    stacked_update(llm, directory)
    return inside.score(llm)


def reloaded_score(llm: Any, directory: str) -> Tensor:
    """Log-probabilities after an update all of whose tensors went through vLLM's reload, one by one."""
    from swapq_vllm.served import Served

    served = Served.of(inside.worker_of(llm))
    honest = served.takes_copies
    served.takes_copies = False
    try:
        update(llm, directory)
    finally:
        served.takes_copies = honest
    return inside.score(llm)


def reloads(llm: Any, directory: str, as_stacks: bool) -> int:
    """How often an update used vLLM's reload."""
    runner = inside.worker_of(llm).model_runner
    calls, honest = [], type(runner).reload_weights

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return honest(self, *args, **kwargs)

    type(runner).reload_weights = counted
    try:
        (stacked_update if as_stacks else update)(llm, directory)
    finally:
        type(runner).reload_weights = honest
    return len(calls)


def reads_of_an_update(llm: Any, directory: str, as_stacks: bool) -> tuple[int, list[str]]:
    """How many tensors a verified update sent; then, in order, what the host asked of tensors, and "sums" for each one digested."""
    import sys

    from swapq.digest import Digests
    from swapq_trl.sending import with_digests
    from swapq_vllm.receiver import apply_update
    from tests.helpers.reads import Reads

    weights = stacked(inside.weights(directory), llm) if as_stacks else inside.weights(directory)
    module, digests = sys.modules[Digests.__module__], Digests()
    one, many = module.add_word_sums, module.add_many_word_sums
    with Reads() as reads:

        def noted(words: Tensor, into: Tensor) -> None:
            reads.names.append("sums")
            one(words, into)

        def all_noted(words: list[Tensor], into: Tensor) -> None:
            reads.names += ["sums"] * len(words)
            many(words, into)

        module.add_word_sums, module.add_many_word_sums = noted, all_noted
        try:
            apply_update(llm, with_digests(iter(weights.items()), digests), digests)
        finally:
            module.add_word_sums, module.add_many_word_sums = one, many
    return len(weights), reads.names


def prefix_cache_after_an_update(llm: Any, directory: str) -> dict[str, int]:
    """Blocks of the KV cache that hold a prefix before an update and after it, that the update visits, and in all."""
    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    every, visited, honest = list(pool.blocks), [], KVCacheBlock.reset_hash
    prompts = [{"prompt_token_ids": [(i * 5 + j) % 64 for j in range(40)]} for i in range(3)]
    llm.generate(prompts, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    before = sum(block.block_hash is not None for block in every)

    def noted(block: Any) -> None:
        visited.append(block.block_id)
        honest(block)

    KVCacheBlock.reset_hash = noted
    try:
        stacked_update(llm, directory)
    finally:
        KVCacheBlock.reset_hash = honest
    return {
        "before": before,
        "visited": len(visited),
        "after": sum(block.block_hash is not None for block in every) + len(pool.cached_block_hash_to_block),
        "same list": pool.blocks == every,
        "all": len(every),
    }


def update_and_score(llm: Any, directory: str) -> Tensor:
    update(llm, directory)
    return inside.score(llm)


def update_from_one_buffer(llm: Any, directory: str) -> dict[str, str]:
    """A sender that overwrites its buffer as soon as it is asked for the next tensor."""
    from swapq_vllm.receiver import apply_update, served_digests

    weights = inside.weights(directory)
    buffer = torch.empty(max(t.numel() * t.element_size() for t in weights.values()), dtype=torch.uint8)

    def send() -> Any:
        for name, tensor in weights.items():
            raw = buffer[: tensor.numel() * tensor.element_size()]
            raw.copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
            yield name, raw.view(tensor.dtype).reshape(tensor.shape)
            buffer.fill_(0x55)

    apply_update(llm, send())
    return served_digests(llm)


def update_from_views(llm: Any, directory: str) -> dict[str, str]:
    """A sender whose tensors are views of one storage, each at an offset of its own."""
    from swapq.digest import tensor_digest
    from swapq_vllm.receiver import apply_update, served_digests

    weights = inside.weights(directory)
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in weights.values()]
    whole = torch.cat([torch.nn.functional.pad(r, (16, -r.numel() % 16)) for r in raw])
    sent, start = {}, 0
    for (name, tensor), r in zip(weights.items(), raw, strict=True):
        sent[name] = whole[start + 16 : start + 16 + r.numel()].view(tensor.dtype).view(tensor.shape)
        start += 16 + r.numel() + -r.numel() % 16
    apply_update(llm, sent.items(), {n: tensor_digest(t) for n, t in sent.items()})
    return served_digests(llm)


def update_with_poisoned_memory(llm: Any, directory: str) -> Tensor:
    """An update and a score during which every uninitialized tensor is filled with NaN (integers: the largest value)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        update(llm, directory)
        return inside.score(llm)
    finally:
        torch.use_deterministic_algorithms(False)


def update_workers(llm: Any, directory: str) -> tuple[list[dict[str, Any]], Tensor]:
    """Every worker spoils its experts and receives stacks: what each says, and the scores afterwards."""
    held = llm.collective_rpc("receive_stacks", args=(directory,))
    llm.reset_prefix_cache()
    return held, inside.score(llm)
