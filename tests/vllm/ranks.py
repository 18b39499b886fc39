"""One engine, two ranks of whole experts and two ranks of sliced experts over the same weights, and what must be equal between them."""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import swapq
from swapq.digest import tensor_digest
from swapq.formats import Parts
from swapq.nn.experts import SwapqExperts
from swapq_vllm.ops import routed_experts
from tests.helpers.models import qwen3_moe
from tests.vllm import inside, updates
from tests.vllm.engine import Engine
from tests.vllm.ranked_worker import assembled, routed_tokens

__all__ = ["KINDS", "TOKENS", "Pair", "Seen", "build", "observe", "trainer_scores"]

TOKENS = (1, 5, 64)
RANKS = 2
TWO = {"tensor_parallel_size": RANKS, "distributed_executor_backend": "mp", "disable_custom_all_reduce": True}
#: the engine -> expert_tp of its recipe, its options
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "whole experts": (1, TWO | {"enable_expert_parallel": True}),
    "sliced experts": (RANKS, TWO),
}
#: sizes whose halves the kernels of a GPU take
SIZES: dict[str, object] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "num_experts": 16,
}


def build(recipe: str, expert_tp: int, seed: int = 0) -> Any:
    """A converted model in BF16 whose experts matter."""
    model = qwen3_moe(**SIZES).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * 0.03 if p.dim() > 1 else 1 + noise * 0.05)
    return swapq.convert(model, recipe, last_layers_bf16=0, expert_tp=expert_tp).eval()


@dataclass
class Seen:
    """What an engine showed.

    Attributes:
        scores: log-probabilities of the prompts' tokens, as it started and after an update with other weights.
        greedy: chosen tokens and their log-probabilities, ``[prompt][position]``.
        blocks: number of tokens -> each rank's experts and its part of the first layer's block, BF16 ``[T, H]``.
        digests: of the tensors put together from all ranks, as it started and after the update.
        reports: what each rank compared in the update.
    """

    scores: list[Tensor] = field(default_factory=list)
    greedy: list[list[tuple[int, float]]] = field(default_factory=list)
    blocks: dict[int, list[tuple[list[int], Tensor]]] = field(default_factory=dict)
    digests: list[dict[str, str]] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    update_seconds: float = 0.0


class Pair:
    """Both exports of a recipe, for each ``expert_tp``: the weights an engine starts from, and others for an update."""

    def __init__(self, recipe: str, root: Path) -> None:
        self.recipe, self.root = recipe, root
        for tp in sorted({tp for tp, _ in KINDS.values()}):
            for seed in (0, 1):
                swapq.export(build(recipe, tp, seed), self.folder(tp, seed))

    def folder(self, expert_tp: int, seed: int) -> Path:
        return self.root / f"{self.recipe}-{expert_tp}-{seed}"


def observe(pair: Pair, options: Mapping[str, Any], at_once: int = 1) -> dict[str, Seen]:
    """What each kind of engine shows, ``at_once`` of them at the same time."""
    with ThreadPoolExecutor(at_once) as pool:
        jobs = {kind: pool.submit(_observe, pair, *KINDS[kind], options) for kind in KINDS}
        return {kind: job.result() for kind, job in jobs.items()}


def _observe(pair: Pair, expert_tp: int, own: Mapping[str, Any], options: Mapping[str, Any]) -> Seen:
    seen, start = Seen(), time.perf_counter()
    first, other = str(pair.folder(expert_tp, 0)), str(pair.folder(expert_tp, 1))
    engine = Engine(
        first,
        daemon=False,
        enforce_eager=True,
        worker_extension_cls="tests.vllm.ranked_worker.RankedWorker",
        **{**options, **own},
    )
    try:
        seen.scores.append(engine(inside.score))
        seen.greedy = engine(greedy)
        for tokens in TOKENS:
            parts = engine(rpc, "partial_block", tokens)
            seen.blocks[tokens] = [
                (experts, torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).view(tokens, -1))
                for experts, raw in parts
            ]
        seen.digests.append(_digests(engine))
        before = time.perf_counter()
        seen.reports, after = engine(updates.update_workers, other)
        seen.update_seconds = time.perf_counter() - before
        seen.scores.append(after)
        seen.digests.append(_digests(engine))
    finally:
        engine.close()
    seen.seconds = time.perf_counter() - start
    return seen


def _digests(engine: Engine) -> dict[str, str]:
    return {name: tensor_digest(t) for name, t in assembled(engine(rpc, "held_parts")).items()}


def rpc(llm: Any, method: str, *arguments: Any) -> list[Any]:
    """What every worker answers."""
    return llm.collective_rpc(method, args=arguments)


def greedy(llm: Any) -> list[list[tuple[int, float]]]:
    """Eight greedy tokens of each prompt, with log-probabilities."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=8, temperature=0, logprobs=0, detokenize=False, ignore_eos=True)
    out = llm.generate([{"prompt_token_ids": p} for p in inside.PROMPTS], params, use_tqdm=False)
    return [
        [(token, at[token].logprob) for token, at in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)]
        for o in out
    ]


def trainer_scores(model: Any) -> Tensor:
    """The trainer's log-probabilities of the prompts' tokens."""
    ids = torch.tensor(inside.PROMPTS, device=model.device)
    with torch.no_grad():
        logp = model(ids).logits.float().log_softmax(-1)
    return logp[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].cpu()


def greedy_difference(a: list[list[tuple[int, float]]], b: list[list[tuple[int, float]]]) -> tuple[float, int, int]:
    """Mean difference of log-probabilities as long as both chose alike and where they part; tokens that are equal, and all."""
    differences, equal = [], 0
    for left, right in zip(a, b, strict=True):
        for (token, logp), (other, other_logp) in zip(left, right, strict=True):
            differences.append(abs(logp - other_logp))  # where they part, too: a near tie
            if token != other:
                break
            equal += 1
    return sum(differences) / len(differences), equal, sum(map(len, a))


def trainer_parts(model: Any, kind: str, tokens: int, ranks: list[tuple[list[int], Tensor]]) -> list[Tensor]:
    """What each rank should add to the first layer's block, computed by the trainer's module from its own masters, BF16 ``[T, H]``.

    Whole experts: the trainer's block, with the slots of other ranks' experts empty. Sliced experts: the block over this rank's slice
    of the trainer's codes.
    """
    experts: SwapqExperts = model.model.layers[0].mlp.experts
    total, hidden = experts.swapq_layout.num_experts, experts.swapq_layout.hidden
    x, ids, weights = (t.to(model.device) for t in routed_tokens(tokens, hidden, total))
    found = []
    for rank, (held, _) in enumerate(ranks):
        with torch.no_grad():
            if kind == "sliced experts":
                up, down = (experts.current(name) for name in (experts.up_name, experts.down_name))
                sliced = _slice(up.parts, 1, 2, rank), _slice(down.parts, 2, 1, rank)
                stored = [[t for t in parts if t is not None] for parts in sliced]
                out = routed_experts(
                    x, weights, ids, None, *stored, experts.spec.weights, experts.spec.activations, "silu", True
                )
            else:
                mine = torch.isin(ids, torch.tensor(held, device=ids.device))
                out = experts(x, torch.where(mine, ids, torch.full_like(ids, -1)), weights)
        found.append(out.cpu())
    return found


def _slice(parts: Parts, axis: int, halves: int, rank: int) -> Parts:
    """A rank's slice of codes and scales along ``axis``, of each of its ``halves`` (gate and up) by itself."""

    def cut(t: Tensor) -> Tensor:
        mine = [half.chunk(RANKS, axis)[rank] for half in t.chunk(halves, axis)]
        return torch.cat([part.contiguous().view(torch.uint8) for part in mine], axis).view(t.dtype)

    return Parts(cut(parts.codes), cut(parts.scales), parts.global_scale)


def judge(pair: Pair, seen: dict[str, Seen], device: str) -> None:
    """Assert what must hold between the engines and the trainer, and print the figures."""
    for kind, (expert_tp, _) in KINDS.items():
        ranks = 1 if kind == "one rank" else RANKS
        mine = seen[kind]
        model = build(pair.recipe, expert_tp).to(device)
        expected = [swapq.digest(pair.folder(expert_tp, seed)) for seed in (0, 1)]
        floor, drift = (
            (mine.scores[0] - other).abs().mean().item()
            for other in (trainer_scores(model), seen["one rank"].scores[0])
        )
        mean, equal, all_tokens = greedy_difference(mine.greedy, seen["one rank"].greedy)
        print(
            f"\n{pair.recipe}, {kind}: mean |log-probability difference| {floor:.5f} to the trainer, {drift:.5f} to one rank (greedy "
            f"{mean:.5f}, {equal} of {all_tokens} tokens equal); {len(expected[0])} digests twice, "
            f"{sum(t.nbytes for t in inside.weights(str(pair.folder(expert_tp, 1))).values())} bytes updated in "
            f"{mine.update_seconds:.2f} s; {mine.seconds:.0f} s in all"
        )
        assert mine.digests == expected, f"{kind}: {_unlike(mine.digests, expected)}"
        assert swapq.digest(model) == expected[0]
        assert len(mine.reports) == ranks
        assert all(r["arrived"] == r["equal"] == len(expected[1]) for r in mine.reports), f"{kind}: {mine.reports}"
        for tokens in TOKENS:
            parts = mine.blocks[tokens]
            assert len(parts) == ranks
            for rank, (found, wanted) in enumerate(
                zip([part for _, part in parts], trainer_parts(model, kind, tokens, parts), strict=True)
            ):
                unequal = int((found.view(torch.int16) != wanted.view(torch.int16)).sum())
                assert unequal == 0, (
                    f"{kind}, {tokens} tokens, rank {rank}: {unequal} of {found.numel()} elements differ"
                )
            total = sum(part.float() for _, part in parts)
            whole = _block(model, tokens)
            assert (total - whole).norm() < 2**-7 * whole.norm(), (
                f"{kind}, {tokens} tokens: the ranks' parts do not add up"
            )
        assert floor < 0.05  # near ties of a random model's routing
        assert not torch.equal(mine.scores[0], mine.scores[1])
        if kind == "sliced experts" and "nvfp4" in pair.recipe:
            continue  # a row's scale reaches over a slice: another function than one rank's, and the trainer's all the same
        assert drift < 0.02
        assert mean < 0.02


def _block(model: Any, tokens: int) -> Tensor:
    experts: SwapqExperts = model.model.layers[0].mlp.experts
    layout = experts.swapq_layout
    x, ids, weights = (t.to(model.device) for t in routed_tokens(tokens, layout.hidden, layout.num_experts))
    with torch.no_grad():
        return experts(x, ids, weights).float().cpu()


def _unlike(found: list[dict[str, str]], expected: list[dict[str, str]]) -> list[str]:
    return [
        name
        for a, b in zip(found, expected, strict=True)
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ][:6]
