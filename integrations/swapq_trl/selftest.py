"""The self-test of a weight sync: the same weights must give the same log-probabilities, bit for bit.

A checksum of received bytes cannot see an engine that loads right bytes into a wrong layout; its own log-probabilities can.
"""

from typing import Any

import torch

from swapq.errors import SyncError

__all__ = ["Scores", "fixed_scores", "require_equal"]

Scores = list[list[float]]
PROMPTS, LENGTH = 4, 32


def fixed_scores(llm: Any) -> Scores:
    """The engine's log-probabilities of the tokens of a few fixed random prompts."""
    from vllm import SamplingParams

    config = llm.llm_engine.model_config
    length = min(LENGTH, config.max_model_len - 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.get_vocab_size(), (PROMPTS, length), generator=generator).tolist()
    parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": row} for row in ids], sampling_params=parameters, use_tqdm=False)
    return [
        [position[token].logprob for token, position in zip(row[1:], output.prompt_logprobs[1:], strict=True)]
        for row, output in zip(ids, outputs, strict=True)
    ]


def require_equal(before: Scores, after: Scores, what: str) -> None:
    """Raise unless both are equal, bit for bit.

    Args:
        what: what happened in between, as a clause.

    Raises:
        SyncError: with the largest difference.
    """
    if before == after:
        return
    worst = max(abs(a - b) for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))
    raise SyncError(
        f"self-test: {what}, and the engine's log-probabilities changed by up to {worst:.3g}. The engine does not hold "
        "what it is sent; do not train with it"
    )
