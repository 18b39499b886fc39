"""The task: sums of two numbers below 20, their rewards, and the data, all made in this process."""

import random
from collections.abc import Iterable
from typing import Any

from datasets import Dataset

LIMIT = 20  # both numbers are below this
MAX_COMPLETION_TOKENS = 6


def all_sums() -> list[tuple[str, str]]:
    """Every prompt of the task with its right answer, in a fixed order."""
    return [(f"{a}+{b}=", str(a + b)) for a in range(LIMIT) for b in range(LIMIT)]


def prompts(count: int, seed: int) -> Dataset:
    """A dataset of `count` random sums with the columns `prompt` and `answer`."""
    rng = random.Random(seed)
    rows = [rng.choice(all_sums()) for _ in range(count)]
    return Dataset.from_dict({"prompt": [p for p, _ in rows], "answer": [a for _, a in rows]})


def supervised_batch(rng: random.Random, size: int, p_right: float) -> list[tuple[str, str]]:
    """`size` sums whose answer is right with probability `p_right` and otherwise a random number of the right range.

    The model learns more than it samples, so that reinforcement learning has something to sharpen.
    """
    batch = []
    for _ in range(size):
        prompt, answer = rng.choice(all_sums())
        if rng.random() >= p_right:
            answer = str(rng.randrange(2 * LIMIT - 1))
        batch.append((prompt, answer))
    return batch


def exact(completion: str, answer: str) -> bool:
    """Whether a completion is the right answer and nothing else."""
    return completion.strip() == answer


def reward(completions: Iterable[str], answer: Iterable[str], **_: Any) -> list[float]:
    """1 for the exact answer, plus 0.2 for the right number of digits, plus 0.2 for the right last digit."""
    scores = []
    for completion, right in zip(completions, answer, strict=True):
        text = completion.strip()
        score = 1.0 if text == right else 0.0
        score += 0.2 if len(text) == len(right) else 0.0
        score += 0.2 if text[-1:] == right[-1:] else 0.0
        scores.append(score)
    return scores


def exact_rate(completions: Iterable[str], answer: Iterable[str], **_: Any) -> list[float]:
    """The measure the report shows: 1 for an exact answer, 0 otherwise. Its weight in the reward is zero."""
    return [float(exact(c, a)) for c, a in zip(completions, answer, strict=True)]
