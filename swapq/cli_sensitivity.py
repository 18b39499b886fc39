"""What ``swapq sensitivity`` does: load, measure with a progress bar, show a table, write the proposed recipe."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from swapq.diagnostics.prompts import prompt_batches
from swapq.diagnostics.sensitivity import Sensitivity, measure_sensitivity
from swapq.errors import UnsupportedError
from swapq.plan import plan
from swapq.plan_table import human_bytes
from swapq.recipe import Recipe

__all__ = ["check_output", "measure", "shown", "write_recipe"]


def check_output(output: Path) -> None:
    """Refuse a file that cannot be written, or that ``--recipe`` would not take, before minutes are spent on measuring.

    Raises:
        UnsupportedError: with the path.
    """
    if output.suffix != ".json":
        raise UnsupportedError(f"{output}: a recipe file ends in .json, else --recipe takes it for a name; rename it")
    if output.is_dir() or not output.parent.is_dir():
        raise UnsupportedError(f"{output}: {'is a folder' if output.is_dir() else 'lies in no folder'}; name a file")


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch has no common class for these
        reason = str(error).splitlines()[0]
        raise UnsupportedError(f"device is {device!r}, which cannot be used here ({reason}); try cpu") from None


def measure(
    directory: Path, recipe: str, prompts: Path | None, device: str, stderr: Console
) -> tuple[Sensitivity, str]:
    """Measure the checkpoint in ``directory``; also a sentence that says on what.

    Raises:
        SwapqError: a recipe or a folder that cannot be planned, a device that is not there, or prompts that cannot be read; before the
            model is loaded.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    resolved = Recipe.resolve(recipe)
    _check_device(device)
    if not plan(directory, resolved.replace(first_layers_bf16=0, last_layers_bf16=0)).quantized:
        raise UnsupportedError(f"recipe {resolved.name!r} quantizes nothing, so there is nothing to rank; name another")
    config = AutoConfig.from_pretrained(directory).get_text_config()
    length = min(256, getattr(config, "max_position_embeddings", None) or 256)  # beyond it the model knows no position
    batches, what = prompt_batches(directory, config.vocab_size, prompts, length)
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    model = loaded.to(device)
    columns = TextColumn("Measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task("layers", total=None)
        found = measure_sensitivity(
            model,
            resolved,
            [ids.to(device) for ids in batches],
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    return found, what


def shown(found: Sensitivity, what: str, keep: int | None) -> list[Table | str]:
    """The ranked layers, and what is proposed."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("layer", "KL with it in BF16", "KL saved", "share", "larger by", "proposed"):
        table.add_column(column, justify="left" if column in ("layer", "proposed") else "right")
    kept = set(found.kept(keep))
    for layer in found.layers:
        share = f"{layer.gain / found.kl:.1%}" if found.kl > 0 else ""
        table.add_row(
            layer.pattern,
            f"{layer.kl:.3e}",
            f"{layer.gain:+.3e}",
            share,
            human_bytes(layer.bytes),
            "keep in BF16" if layer in kept else "",
        )
    names = ", ".join(sorted((layer.pattern for layer in kept), key=lambda p: int(p.rpartition(".")[2]))) or "nothing"
    return [
        f"recipe {found.original.name}: KL(BF16 model || quantized) {found.kl:.3e} nats per token, {found.tokens} predictions ({what})",
        table,
        f"proposed: keep {names} in BF16",
    ]


def write_recipe(found: Sensitivity, keep: int | None, output: Path) -> None:
    """The proposal as a recipe file, which every command and :func:`swapq.convert` take."""
    output.write_text(json.dumps(found.proposal(keep).to_dict(), indent=1) + "\n", encoding="utf-8")
