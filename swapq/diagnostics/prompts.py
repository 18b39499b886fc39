"""Token ids for diagnostics: prompts of the user's, or a few built in; where a folder has no tokenizer, ids drawn from a fixed seed."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from swapq.errors import UnsupportedError

__all__ = ["prompt_batches"]

_BUILT_IN = (
    "The capital of France is Paris, and the capital of Japan is Tokyo. The largest city of Brazil is",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n\nprint(fibonacci(10))",
    "Question: A train leaves at 9:40 and arrives at 13:05. How long is the journey? Answer: 3 hours and 25 minutes, because",
    "In 1687 Newton published three laws of motion. The first says that a body stays at rest unless a force acts on it.",
)
_DRAWN = (8, 32)


def prompt_batches(
    directory: Path, vocab_size: int, file: Path | None = None, length: int = 256
) -> tuple[list[Tensor], str]:
    """Batches of one prompt each, and a sentence that says what they are.

    Args:
        directory: the model's folder, for its tokenizer.
        vocab_size: of the model, for ids drawn where there is no tokenizer.
        file: one prompt a line.
        length: prompts are cut to so many tokens.

    Raises:
        UnsupportedError: a file of prompts without a tokenizer, one that is not UTF-8, or one without a prompt of two tokens.
    """
    from transformers import AutoTokenizer

    lines: Sequence[str] = _BUILT_IN if file is None else _lines(file)
    if not lines:
        raise UnsupportedError(f"{file}: holds no prompt; write one a line")
    if not any(
        (directory / name).exists()
        for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    ):
        if file is not None:
            raise UnsupportedError(
                f"{directory}: has no tokenizer, which the prompts of {file} need; copy it into the folder"
            )
        ids = torch.randint(0, vocab_size, _DRAWN, generator=torch.Generator().manual_seed(0))[:, :length]
        return [ids], f"{directory} has no tokenizer: {ids.shape[0]} sequences of {ids.shape[1]} random tokens"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    batches = [tokenizer(line, return_tensors="pt", verbose=False).input_ids[:, :length] for line in lines]
    batches = [ids for ids in batches if ids.shape[1] > 1]
    if not batches:
        raise UnsupportedError(
            f"{file or directory}: no prompt has two tokens, so nothing is predicted; write longer ones"
        )
    return batches, f"{len(batches)} prompts" + ("" if file is None else f" of {file}")


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise UnsupportedError(f"{file}: is no UTF-8 text ({error.reason} at byte {error.start})") from None
