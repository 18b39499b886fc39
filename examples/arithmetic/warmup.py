"""The supervised start: from random weights to a mediocre level, kept on disk under a key of all it depends on."""

import contextlib
import dataclasses
import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from arithmetic.model import build_model, build_tokenizer, model_config
from arithmetic.task import supervised_batch

Pairs = list[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Warmup:
    """What the supervised start depends on; the same settings give the same folder."""

    seed: int = 0
    steps: int = 700
    batch: int = 64
    learning_rate: float = 1e-3
    p_right: float = 0.4
    ramp: int = 0
    """Steps over which the learning rate rises from zero."""
    clip: float | None = None
    """The largest norm of the gradient."""
    target: float | None = None
    """Stop as soon as a sampled answer is right with this probability; None takes all steps."""


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What is taught, and to which model: the arithmetic ones unless said otherwise."""

    name: str = "sums"
    build_model: Callable[[], PreTrainedModel] = build_model
    build_tokenizer: Callable[[], PreTrainedTokenizerBase] = build_tokenizer
    config: Callable[[], Any] = model_config
    batch: Callable[[random.Random, int, float], Pairs] = supervised_batch
    """(generator, size, probability that an answer is right) -> prompts and answers."""
    version: str = "1"
    """Of the data: changes when the same seed gives other prompts."""
    on_gpu: bool = False
    """Whether a GPU is used where there is one: a tiny model on sums is taught as quickly without."""

    def device(self) -> torch.device:
        """Where this process teaches it."""
        return torch.device("cuda" if self.on_gpu and torch.cuda.is_available() else "cpu")

    def key(self, settings: Warmup) -> str:
        """A short name that changes with the settings, the data, the model's shape, torch's version and the kind of device."""
        config = self.config().to_dict()
        config.pop("transformers_version", None)
        parts = {
            "settings": dataclasses.asdict(settings),
            "lesson": [self.name, self.version],
            "model": config,
            "torch": torch.__version__,
            "device": self.device().type,
            "version": 2,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


SUMS = Lesson()
#: prompts of the measure that `Warmup.target` is about, and steps between two measurements
_MEASURED, _EVERY = 256, 25


def warm_model(cache: Path, settings: Warmup | None = None, *, lesson: Lesson = SUMS, quiet: bool = False) -> Path:
    """The folder of the supervised model, trained now if the cache does not hold it yet."""
    settings = settings or Warmup()
    folder = cache / f"start-{lesson.key(settings)}"
    if (folder / "config.json").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    tokenizer = lesson.build_tokenizer()
    set_seed(settings.seed)
    model = lesson.build_model().to(lesson.device())
    teach(model, tokenizer, settings, lesson=lesson, quiet=quiet)
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


def teach(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Warmup,
    *,
    lesson: Lesson = SUMS,
    quiet: bool = False,
    bf16: bool | None = None,
) -> None:
    """Train `model`, in place and where it is: any causal LM with this tokenizer.

    Args:
        bf16: compute in BF16, with the FP32 weights as masters; None does so on a GPU.
    """
    bf16 = model.device.type == "cuda" if bf16 is None else bf16
    rng, device = random.Random(settings.seed), model.device
    # a generator of its own: measuring must not change what is taught
    measured = encode(tokenizer, lesson.batch(random.Random(settings.seed + 1), _MEASURED, 1.0), device)
    options: dict[str, Any] = {"fused": True} if device.type == "cuda" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0, **options)
    ramp = max(1, settings.ramp)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / ramp))
    columns = (
        TextColumn("supervised start"),
        BarColumn(),
        TextColumn("{task.fields[measured]}"),
        TimeRemainingColumn(),
    )
    progress, right = Progress(*columns, disable=quiet), ""
    if not quiet and not progress.console.is_terminal:  # where the bar shows nothing before its end
        print(f"supervised start: up to {settings.steps} steps", flush=True)
    with progress, _served_weights(model) if bf16 else contextlib.nullcontext():
        bar = progress.add_task("start", total=settings.steps, measured="")
        for step in range(settings.steps):
            ids, labels = encode(tokenizer, lesson.batch(rng, settings.batch, settings.p_right), device)
            # entered for every forward: autocast keeps rounded weights until it is left
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
                loss = model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            if settings.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            schedule.step()
            if settings.target is not None and (step + 1) % _EVERY == 0:
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
                    share = _right(model, *measured)
                right = f", right {share:.3f}"
                if quiet:
                    print(f"supervised start: step {step + 1}, loss {loss.item():.3f}{right}", flush=True)
                if share >= settings.target:
                    break
            if not quiet:
                progress.update(bar, advance=1, measured=f"loss {loss.item():.3f}{right}")
        else:
            if settings.target is not None:
                print(f"supervised start: {settings.steps} steps did not reach {settings.target:g}", flush=True)


@contextlib.contextmanager
def _served_weights(model: PreTrainedModel) -> Iterator[None]:
    """In BF16 autocast, everything is computed with rounded weights, as a rollout engine does: norms, embeddings, and the grouped
    product of the experts, which autocast does not know."""
    from swapq_trl.rounding import round_as_served

    handles = round_as_served(model)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _right(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor) -> float:
    """The mean probability that a sampled answer is the right one, end token included."""
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=(ids != 0).long()).logits[:, :-1].float()
    wanted = labels[:, 1:]
    chosen = logits.log_softmax(-1).gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return chosen.masked_fill(wanted < 0, 0.0).sum(-1).exp().mean().item()


def encode(
    tokenizer: PreTrainedTokenizerBase, batch: Pairs, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded token ids and labels that cover only the answer and the end token."""
    heads = tokenizer([prompt for prompt, _ in batch])["input_ids"]
    tails = tokenizer([answer for _, answer in batch])["input_ids"]
    rows, marks = [], []
    for head, answer in zip(heads, tails, strict=True):
        tail = [*answer, tokenizer.eos_token_id]
        rows.append(head + tail)
        marks.append([-100] * len(head) + tail)
    width = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows], device=device)
    labels = torch.tensor([mark + [-100] * (width - len(mark)) for mark in marks], device=device)
    return ids, labels
