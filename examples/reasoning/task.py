"""The task: short exercises that the package reasoning-gym generates and scores. Nothing of them is made here.

The prompt is the package's question and a mark where the answer begins, the reward is the package's `score_answer`.
"""

import dataclasses
import functools
import importlib.metadata
import json
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from datasets import Dataset

import swapq
from reasoning import INSTALL

__all__ = [
    "EXERCISES",
    "Exercise",
    "entries",
    "exact_rate",
    "prompts",
    "reward",
    "score",
    "supervised_batch",
    "version",
]

MAX_PROMPT_TOKENS = 96
MAX_COMPLETION_TOKENS = 24
ANSWER_MARK = " A:"


@dataclasses.dataclass(frozen=True)
class Exercise:
    """One dataset of the package, and how hard it is made."""

    name: str
    options: Mapping[str, Any]


#: each is drawn equally often
EXERCISES = (
    Exercise("chain_sum", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
    Exercise("spell_backward", {"min_word_len": 3, "max_word_len": 4}),
    Exercise("letter_counting", {"min_words": 1, "max_words": 3}),
    Exercise("lcm", {"min_value": 1, "max_value": 15}),
    Exercise("count_bits", {"min_n": 1, "max_n": 127}),
)
# The package draws entry i of seed s from s + i, so neighbouring seeds share entries: ours lie far apart.
_APART = 10_000_019


def entries(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` entries of the package with a short question, from all exercises in turn at random; the same seed gives the same."""
    rng = random.Random(seed)
    return [_entry(rng) for _ in range(count)]


def prompt_of(entry: Mapping[str, Any]) -> str:
    """What the model reads."""
    return entry["question"] + ANSWER_MARK


def prompts(count: int, seed: int) -> Dataset:
    """A dataset with the columns `prompt`, `answer`, and `entry`: what the package scores an answer with."""
    rows = entries(count, seed)
    return Dataset.from_dict(
        {
            "prompt": [prompt_of(row) for row in rows],
            "answer": [row["answer"] for row in rows],
            "entry": [json.dumps(row) for row in rows],
        }
    )


def supervised_batch(rng: random.Random, size: int, p_right: float) -> list[tuple[str, str]]:
    """`size` prompts whose answer is right with probability `p_right` and otherwise that of another entry of the same exercise.

    The model learns more than it samples, so that reinforcement learning has something to sharpen.
    """
    batch = []
    for _ in range(size):
        entry = _entry(rng)
        right = rng.random() < p_right
        answer = entry["answer"] if right else _entry(rng, entry["metadata"]["source_dataset"])["answer"]
        batch.append((prompt_of(entry), answer))
    return batch


def score(completion: str, entry: Mapping[str, Any]) -> float:
    """The package's own score of an answer to `entry`, 0 to 1."""
    name = entry["metadata"]["source_dataset"]
    return float(_scorer(name)(completion.strip(), entry))


def reward(completions: Iterable[str], entry: Iterable[str], **_: Any) -> list[float]:
    """The package's scores: 1 for a right answer, and for most exercises a part of it for a part of the answer."""
    return [score(completion, json.loads(text)) for completion, text in zip(completions, entry, strict=True)]


def exact_rate(completions: Iterable[str], entry: Iterable[str], **_: Any) -> list[float]:
    """The measure the report shows: 1 where the package's score is full, 0 otherwise. Its weight in the reward is zero."""
    return [float(value >= 1.0) for value in reward(completions, entry)]


def version() -> str:
    """Of the package and the exercises: another one may give other prompts."""
    _package()  # an error that says what to install
    return f"{importlib.metadata.version('reasoning-gym')} {EXERCISES} {ANSWER_MARK!r}"


def _entry(rng: random.Random, name: str | None = None) -> dict[str, Any]:
    """The next entry that fits, of the exercise `name` or of any."""
    names = [exercise.name for exercise in EXERCISES]
    dataset = _dataset(names.index(name or rng.choice(names)))
    while True:
        entry = dataset[rng.randrange(_APART)]
        fits = len(prompt_of(entry)) <= MAX_PROMPT_TOKENS and len(entry["answer"]) < MAX_COMPLETION_TOKENS
        if fits and (entry["question"] + entry["answer"]).isascii():
            return entry


@functools.cache
def _dataset(index: int) -> Any:
    exercise = EXERCISES[index]
    return _package().create_dataset(exercise.name, size=_APART, seed=(index + 1) * _APART, **exercise.options)


@functools.cache
def _scorer(name: str) -> Callable[[str, Mapping[str, Any]], float]:
    return _package().get_score_answer_fn(name)


@functools.cache
def _package() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise swapq.SwapqError(f"{INSTALL} (importing it: {error})") from error
    return reasoning_gym
