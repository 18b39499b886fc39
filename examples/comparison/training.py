"""One run: one configuration with one seed, from the shared supervised start, and what it measured as JSON."""

import argparse
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

# imported first: it sets the environment that the others read
from grpo_arithmetic import EXACT, training_config

# isort: split
import torch
from arithmetic.task import exact_rate, prompts, reward
from arithmetic.warmup import warm_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, set_seed
from transformers.utils import logging as transformers_logging

import swapq
from comparison.clock import StepClock
from comparison.configuration import Configuration
from comparison.memory import peak_bytes, saved_for_backward
from swapq_trl import GRPOTrainer

__all__ = ["METRICS", "run", "run_logged"]

#: kept of every step: name in the run's file -> name in the trainer's log
METRICS = {
    "exact": EXACT,
    "reward": "reward",
    "grad_norm": "grad_norm",
    "mismatch_mean": "swapq/mismatch_abs_mean",
    "mismatch_max": "swapq/mismatch_abs_max",
    "mismatch_k3": "swapq/mismatch_k3",
    "ess": "swapq/mismatch_ess",
    "reference_k1": "swapq/reference_kl_k1",
    "reference_k3": "swapq/reference_kl_k3",
    "entropy": "entropy",
}


def run(configuration: Configuration, *, seed: int, steps: int, output: Path, cache: Path) -> dict[str, Any]:
    """Train, and return the settings, one row a step, and the figures of the whole run.

    Every run starts from the same supervised model; `seed` decides the prompts and the sampling, alike for every configuration.
    """
    transformers_logging.disable_progress_bar()
    began = time.perf_counter()
    source = warm_model(cache, quiet=True)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    overrides = {} if configuration.backward is None else {"backward": configuration.backward}
    swapq.convert(model, configuration.recipe, **overrides)
    recipe = swapq.recipe_of(model)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    options = argparse.Namespace(steps=steps, seed=seed, output=output)
    trainer = GRPOTrainer(
        model,
        [reward, exact_rate],
        args=training_config(options),
        train_dataset=prompts(16 * steps, seed),
        processing_class=tokenizer,
        reference_model=reference,
    )
    trainer.remove_callback(PrinterCallback)
    clock = StepClock(trainer, reference)
    trainer.add_callback(clock)
    set_seed(seed)  # building the engine has drawn numbers, and not equally many in every recipe
    ready = time.perf_counter()
    trainer.train()
    trained = time.perf_counter()
    history = [row for row in trainer.state.log_history if "reward" in row]
    rows = [
        {"step": step, **{name: row.get(logged) for name, logged in METRICS.items()}, "seconds": seconds}
        for step, (row, seconds) in enumerate(zip(history, clock.rows, strict=True), start=1)
    ]
    peak = peak_bytes()
    ids = torch.arange(128 * 8, device=model.device).reshape(128, 8) % 16 + 3
    return {
        "label": configuration.label,
        "recipe": recipe.to_dict(),
        "policies": recipe.policies,
        "seed": seed,
        "steps": steps,
        "rows": rows,
        "sync_bytes": int(history[-1]["swapq/sync_bytes"]),
        "sync_tensors": int(history[-1]["swapq/sync_tensors_verified"]),
        "saved_for_backward": saved_for_backward(model, ids),
        "peak_bytes": peak,
        "seconds_to_start": ready - began,
        "seconds_to_train": trained - ready,
    }


def run_logged(configuration: Configuration, seed: int, steps: int, path: Path, cache: Path) -> None:
    """`run` in this process, its text in `path`.log, its result in `path` at the end: whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".log").open("w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        result = run(configuration, seed=seed, steps=steps, output=path.with_suffix(""), cache=cache)
    staging = path.with_suffix(".part")
    staging.write_text(json.dumps(result), encoding="utf-8")
    os.replace(staging, path)
