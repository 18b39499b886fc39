"""One run: one configuration with one seed, from the shared supervised start, and what it measured as JSON."""

import argparse
import json
import os
import time
from typing import Any

# imported first: it sets the environment that the others read
from grpo_arithmetic import EXACT, training_config

# isort: split
import torch
from arithmetic.warmup import warm_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, set_seed
from transformers.utils import logging as transformers_logging

import swapq
from comparison.clock import StepClock
from comparison.job import Job, job_of
from comparison.memory import peak_bytes, saved_for_backward
from comparison.schedule import Order
from swapq_trl import GRPOTrainer

__all__ = ["METRICS", "engine_options", "run", "run_to_file"]

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

#: batch sizes with a CUDA graph: the whole batch, and two for what is left of it when most sequences have ended
_GRAPHS = [16, 64, 128]


def engine_options(job: Job, *, eager: bool) -> dict[str, Any]:
    """More arguments of the rollout engine than the main job has.

    The size of the KV cache is given, where vLLM would otherwise measure free memory: that fails while neighbours on the device
    allocate and free theirs.
    """
    options: dict[str, Any] = {"enforce_eager": True} if eager else {}
    if job.kv_cache_bytes is not None:
        options["kv_cache_memory_bytes"] = job.kv_cache_bytes
        if torch.cuda.is_available() and not eager:
            options["compilation_config"] = {"cudagraph_capture_sizes": _GRAPHS}
    return options


def run(order: Order) -> dict[str, Any]:
    """Train, and return the settings, one row a step, and the figures of the whole run.

    Every run starts from the same supervised model; the seed decides the prompts and the sampling, alike for every configuration.
    """
    transformers_logging.disable_progress_bar()
    began = time.perf_counter()
    configuration, job = order.configuration, job_of(order.task, order.size)
    source = warm_model(order.cache, job.warmup, lesson=job.lesson, quiet=True)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    swapq.convert(model, job.recipe(configuration.recipe), **configuration.changes())
    recipe = swapq.recipe_of(model)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    options = argparse.Namespace(steps=order.steps, seed=order.seed, output=order.path.with_suffix(""))
    trainer = GRPOTrainer(
        model,
        list(job.rewards),
        args=training_config(options, **job.training),
        train_dataset=job.prompts(16 * order.steps, order.seed),
        processing_class=tokenizer,
        reference_model=reference,
        engine_options=engine_options(job, eager=order.eager),
    )
    trainer.remove_callback(PrinterCallback)
    clock = StepClock(trainer, reference)
    trainer.add_callback(clock)
    set_seed(order.seed)  # building the engine has drawn numbers, and not equally many in every recipe
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
        "task": job.task,
        "size": job.size,
        "text": job.text,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "sharing": order.parallel,
        "recipe": recipe.to_dict(),
        "policies": recipe.policies,
        "seed": order.seed,
        "steps": order.steps,
        "rows": rows,
        "sync_bytes": int(history[-1]["swapq/sync_bytes"]),
        "sync_tensors": int(history[-1]["swapq/sync_tensors_verified"]),
        "saved_for_backward": saved_for_backward(model, ids),
        "peak_bytes": peak,
        "seconds_to_start": ready - began,
        "seconds_to_train": trained - ready,
    }


def run_to_file(order: Order) -> None:
    """`run` in this process, its result in the order's path at the end: whole or not at all."""
    result = run(order)
    staging = order.path.with_suffix(".part")
    staging.write_text(json.dumps(result), encoding="utf-8")
    os.replace(staging, order.path)
