"""The supervised start: from random weights to a mediocre level, kept on disk under a key of all it depends on."""

import dataclasses
import hashlib
import json
import random
import shutil
import tempfile
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from arithmetic.model import build_model, build_tokenizer, model_config
from arithmetic.task import supervised_batch


@dataclasses.dataclass(frozen=True)
class Warmup:
    """What the supervised start depends on; the same settings give the same folder."""

    seed: int = 0
    steps: int = 700
    batch: int = 64
    learning_rate: float = 1e-3
    p_right: float = 0.4

    def key(self) -> str:
        """A short name that changes with these settings, the model's shape and torch's version."""
        config = model_config().to_dict()
        config.pop("transformers_version", None)
        parts = {"settings": dataclasses.asdict(self), "model": config, "torch": torch.__version__, "version": 1}
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def warm_model(cache: Path, settings: Warmup | None = None, *, quiet: bool = False) -> Path:
    """The folder of the supervised model, trained now if the cache does not hold it yet."""
    settings = settings or Warmup()
    folder = cache / f"start-{settings.key()}"
    if (folder / "config.json").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    set_seed(settings.seed)
    model = build_model()
    teach(model, tokenizer, settings, quiet=quiet)
    # written beside its place and moved in one step, so that an interrupted run leaves no half folder behind
    staging = Path(tempfile.mkdtemp(dir=cache))
    model.config.dtype = torch.float32
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    try:
        staging.rename(folder)
    except OSError:  # another process finished the same start first
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def teach(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Warmup, *, quiet: bool = False) -> None:
    """Train `model` on sums, in place: any causal LM with this tokenizer."""
    rng = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    loss_column = TextColumn("loss {task.fields[loss]:.3f}")
    columns = (TextColumn("supervised start"), BarColumn(), loss_column, TimeRemainingColumn())
    with Progress(*columns, disable=quiet) as progress:
        bar = progress.add_task("start", total=settings.steps, loss=float("nan"))
        for _ in range(settings.steps):
            batch = supervised_batch(rng, settings.batch, settings.p_right)
            ids, labels = encode(tokenizer, batch)
            loss = model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress.update(bar, advance=1, loss=loss.item())


def encode(tokenizer: PreTrainedTokenizerBase, batch: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded token ids and labels that cover only the answer and the end token."""
    rows, marks = [], []
    for prompt, answer in batch:
        head = tokenizer(prompt)["input_ids"]
        tail = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
        rows.append(head + tail)
        marks.append([-100] * len(head) + tail)
    width = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    labels = torch.tensor([mark + [-100] * (width - len(mark)) for mark in marks])
    return ids, labels
