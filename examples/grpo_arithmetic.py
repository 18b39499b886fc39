"""The main job: a tiny Qwen3-MoE learns arithmetic by GRPO, in one low-precision recipe on both sides.

From nothing to a report, without a network: a supervised start (kept on disk), `swapq.convert`, TRL's GRPO with vLLM
rollouts in the same process, an export, and a check that a fresh vLLM and transformers read it alike.

    python examples/grpo_arithmetic.py --recipe nvfp4-rl --backward dequantized --steps 150
"""

import argparse
import contextlib
import logging
import os
import statistics
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Everything is made here: nothing is downloaded, nothing is reported anywhere.
for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it compiles at the first use, for minutes
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}.items():
    os.environ.setdefault(_name, _value)
for _noisy in ("torchao", "torch.utils._pytree", "transformers.utils.import_utils"):
    logging.getLogger(_noisy).setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", category=UserWarning)
warnings.filterwarnings("ignore", category=FutureWarning)

import torch  # noqa: E402
from arithmetic.check import Agreement, compare_export  # noqa: E402
from arithmetic.live import LiveTable  # noqa: E402
from arithmetic.task import MAX_COMPLETION_TOKENS, all_sums, exact, exact_rate, prompts, reward  # noqa: E402
from arithmetic.warmup import warm_model  # noqa: E402
from rich.console import Console  # noqa: E402
from safetensors import SafetensorError  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402
from trl import GRPOConfig  # noqa: E402

import swapq  # noqa: E402
from swapq.diagnostics.report import PANELS, Panel, write_report  # noqa: E402
from swapq_trl import GRPOTrainer  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
EXACT = "rewards/exact_rate/mean"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--recipe", default="nvfp4-rl", help="a named recipe or a .json file (default: nvfp4-rl); `bf16` is the control"
    )
    add("--backward", help="low_precision, high_precision or dequantized (default: the recipe's)")
    add("--steps", type=int, default=150, help="GRPO steps (default: 150)")
    add("--model", type=Path, help="start from this model folder instead of the supervised tiny one")
    add("--seed", type=int, default=0, help="seed of data, sampling and the supervised start (default: 0)")
    add("--output", type=Path, help="folder of the run (default: runs/arithmetic/RECIPE[-BACKWARD])")
    cache = ROOT / ".cache" / "arithmetic"
    add("--cache", type=Path, default=cache, help="where the supervised start is kept (default: .cache/arithmetic)")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1; got {options.steps}")
    if options.model is not None and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model} is not a model folder: it has no config.json")
    if options.output is None:
        recipe = Path(options.recipe).stem if options.recipe.endswith(".json") else options.recipe
        name = "-".join(part for part in (recipe, options.backward) if part)
        options.output = ROOT / "runs" / "arithmetic" / name
    return options


def training_config(options: argparse.Namespace, **others: Any) -> GRPOConfig:
    """16 prompts of 8 completions a step; the settings that docs/main-job.md explains, and `others` in their place."""
    settings: dict[str, Any] = dict(
        output_dir=str(options.output / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=MAX_COMPLETION_TOKENS,
        temperature=1.0,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        beta=0.0,
        reward_weights=[1.0, 0.0],  # the exact rate is shown, not rewarded twice
        router_aux_loss_coef=0.0,  # on by default in TRL: the load-balancing loss would pull against the task
        vllm_importance_sampling_mode="token_truncate",  # per sequence, the ratio grows with the length
        bf16=True,
        gradient_checkpointing=False,  # on by default in TRL; here it only computes each forward twice
        use_cpu=not torch.cuda.is_available(),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.05,
        vllm_max_model_length=32,
        seed=options.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return GRPOConfig(**(settings | others))


def tiny_model(options: argparse.Namespace) -> Path:
    """The folder to start from."""
    if options.model is not None:
        return options.model
    from arithmetic.warmup import Warmup

    return warm_model(options.cache, Warmup(seed=options.seed))


def open_start(source: Path) -> tuple[Any, Any]:
    """Model, with FP32 masters, and tokenizer of the folder to start from."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        read = tokenizer.decode(tokenizer("7+12=").input_ids, skip_special_tokens=True)
        if read.replace(" ", "") != "7+12=":  # where there is no tokenizer, transformers makes one without a vocabulary
            raise swapq.SwapqError(
                f"{source}: its tokenizer makes {read!r} of '7+12='; save the model's own tokenizer beside it "
                "(tokenizer.save_pretrained)"
            )
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    except swapq.SwapqError:
        raise
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise swapq.SwapqError(f"{source}: cannot be opened ({reason})") from error
    known, largest = model.get_input_embeddings().num_embeddings, max(tokenizer("0123456789+=").input_ids)
    if largest >= known:
        raise swapq.SwapqError(
            f"{source}: its tokenizer has the id {largest} and its model knows {known}; they do not belong together"
        )
    return model, tokenizer


def convert(model: Any, options: argparse.Namespace, console: Console) -> Any:
    """`swapq.convert` with the chosen recipe, and the plan it follows."""
    overrides = {} if options.backward is None else {"backward": options.backward}
    swapq.convert(model, options.recipe, **overrides)
    recipe = swapq.recipe_of(model)
    console.print(f"recipe {recipe.name}, backward {recipe.backward}")
    return model


@contextlib.contextmanager
def waiting(console: Console, text: str) -> Iterator[None]:
    """A spinner on a terminal, a line elsewhere."""
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        console.print(text)
        yield


def run(options: argparse.Namespace) -> int:
    """The whole job; the exit code says whether the export is read alike by vLLM and transformers."""
    console = Console()
    transformers_logging.disable_progress_bar()
    source = tiny_model(options)
    model, tokenizer = open_start(source)
    bf16_bytes = 2 * sum(parameter.numel() for parameter in model.parameters())
    convert(model, options, console)

    with waiting(console, "building the rollout engine"):
        trainer = GRPOTrainer(
            model,
            [reward, exact_rate],
            args=training_config(options),
            train_dataset=prompts(16 * options.steps, options.seed),
            processing_class=tokenizer,
        )
    trainer.remove_callback(PrinterCallback)
    with LiveTable(options.steps, f"GRPO on sums, {options.recipe}") as table:
        trainer.add_callback(table)
        trainer.train()
    history = [row for row in trainer.state.log_history if "reward" in row]

    checkpoint = options.output / "checkpoint"
    with waiting(console, f"exporting to {checkpoint}"):
        model.to(torch.bfloat16)  # what stays unquantized is published in BF16; codes come from BF16 masters anyway
        swapq.export(model, checkpoint)
        tokenizer.save_pretrained(checkpoint)
    sums = all_sums()[:: max(1, len(all_sums()) // 100)]
    with waiting(console, "opening the export in a fresh vLLM and in transformers"):
        agreement = compare_export(checkpoint, [prompt for prompt, _ in sums])
    greedy = statistics.fmean(exact(text, answer) for text, (_, answer) in zip(agreement.texts, sums, strict=True))

    tables = result_tables(options, history, agreement, greedy, bf16_bytes, checkpoint)
    panels = (Panel("Exact answers", {"exact rate": EXACT}, smooth=10), *PANELS)
    page = write_report(history, options.output, title=f"GRPO on sums, {options.recipe}", tables=tables, panels=panels)
    for name, rows in tables.items():
        console.rule(name)
        for label, value in rows.items():
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            console.print(f"{label:<52} {text}", soft_wrap=True)
    console.print(f"report: {page}", soft_wrap=True)
    if not agreement.ok:
        print("error: vLLM and transformers do not agree on the export", file=sys.stderr)
        return 1
    return 0


def result_tables(
    options: argparse.Namespace,
    history: list[dict[str, Any]],
    agreement: Agreement,
    greedy: float,
    bf16_bytes: int,
    checkpoint: Path,
) -> dict[str, dict[str, object]]:
    """What the report says above its curves."""
    tenth = max(1, min(10, len(history) // 2))

    def mean(name: str, rows: list[dict[str, Any]] = history) -> float:
        return statistics.fmean(row[name] for row in rows)

    start, end = mean(EXACT, history[:tenth]), mean(EXACT, history[-tenth:])
    later = history[1:] or history
    return {
        "Learning": {
            "recipe": options.recipe,
            "steps": len(history),
            f"exact rate, first {tenth} steps": start,
            f"exact rate, last {tenth} steps": end,
            "times the start": end / start if start else float("inf"),
            "exact rate of greedy answers at the end": greedy,
            "seconds a step (median, without the first)": statistics.median(row["step_time"] for row in later),
        },
        "Same policy on both sides": {
            "mean |log-probability difference|": mean("swapq/mismatch_abs_mean"),
            "largest |log-probability difference|": max(row["swapq/mismatch_abs_max"] for row in history),
            "KL k3, mean": mean("swapq/mismatch_k3"),
            "effective sample size, mean": mean("swapq/mismatch_ess"),
            "tokens masked by the correction, mean": mean("swapq/mismatch_masked_fraction"),
        },
        "Weight sync": {
            "seconds (median)": statistics.median(row["swapq/sync_seconds"] for row in history),
            "bytes": int(history[-1]["swapq/sync_bytes"]),
            "bytes of the same weights in BF16": bf16_bytes,
            "tensors verified on both sides, each sync": int(history[-1]["swapq/sync_tensors_verified"]),
        },
        "Export, opened by a fresh vLLM and by transformers": {
            "folder": str(checkpoint),
            "bytes of its tensors": sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")),
            "greedy answers that agree": f"{agreement.same} of {agreement.answers}",
            "mean |log-probability difference| ": agreement.mean_difference,
            "largest |log-probability difference| ": agreement.max_difference,
        },
    }


def main() -> int:
    """Run the job; a request that cannot be carried out is one line on standard error and exit code 2."""
    try:
        return run(parse_arguments())
    except swapq.SwapqError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
