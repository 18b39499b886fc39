"""How far vLLM's rollouts are from the trainer's log-probabilities: the BF16 floor, matched recipes, and an unmatched pair.

One table on one model. Each row is a fresh vLLM process that samples from an export, and a trainer that scores the samples:

    python benchmarks/mismatch.py                  # the supervised tiny model of the main job
    python benchmarks/mismatch.py --model PATH     # a folder that `save_pretrained` wrote, with its tokenizer
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(_name, _value)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
MAX_TOKENS = 6


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: what samples, and what scores."""

    label: str
    rollout: str
    trainer: str


ROWS = (
    Row("bf16", "bf16", "bf16"),
    Row("mxfp8-rl, matched", "mxfp8-rl", "mxfp8-rl"),
    Row("nvfp4-rl, matched, default layers in BF16", "nvfp4-rl default", "nvfp4-rl default"),
    Row("nvfp4-rl, matched, every layer NVFP4", "nvfp4-rl", "nvfp4-rl"),
    Row("fp8-block-rl, matched", "fp8-block-rl", "fp8-block-rl"),
    Row("fp8-rollout: FP8 rollout, BF16 trainer", "fp8-block-rl", "fp8-rollout"),
    Row("int4-qat in groups of 32, matched", "int4-qat", "int4-qat"),
    Row("unmatched: NVFP4 rollout, BF16 trainer", "nvfp4-rl", "bf16"),
)


def converted(source: Path, recipe: str) -> Any:
    """The model with FP32 masters, converted."""
    import torch
    from transformers import AutoModelForCausalLM

    import swapq
    from swapq_trl.rounding import round_as_served

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    name, _, default = recipe.partition(" ")
    overrides: dict[str, Any] = {"last_layers_bf16": 0} if name == "nvfp4-rl" and not default else {}
    if name == "int4-qat":  # 128 does not divide the tiny model's inner length
        overrides["weights"] = {"routed_experts": "int4_g32"}
    swapq.convert(model, name, **overrides)
    round_as_served(model)  # as the trainers of swapq_trl do
    return model.to("cuda" if torch.cuda.is_available() else "cpu")  # where vLLM runs too


def sample(directory: Path, prompts: list[list[int]], seed: int) -> list[dict[str, Any]]:
    """Completions and their log-probabilities from a vLLM process that opens `directory`."""
    done = subprocess.run(
        [sys.executable, __file__, "--sample", str(directory), "--seed", str(seed)],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"vLLM could not sample from {directory}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def serve(directory: str, seed: int) -> None:
    """The vLLM process."""
    from vllm import LLM, SamplingParams

    prompts = json.load(sys.stdin)
    llm = LLM(
        model=directory,
        dtype="bfloat16",
        enforce_eager=True,
        gpu_memory_utilization=0.2,
        max_model_len=64,
        seed=seed,
        logprobs_mode="processed_logprobs",
    )
    parameters = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, logprobs=0)
    answers = []
    for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False):
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        logps = [position[token].logprob for token, position in zip(ids, completion.logprobs, strict=True)]
        answers.append({"ids": ids, "logps": logps})
    print(json.dumps(answers))


def score(model: Any, prompts: list[list[int]], answers: list[dict[str, Any]], pad: int, batch: int = 128) -> Any:
    """Log-probabilities of the answers' tokens, in left-padded batches under BF16 autocast, as TRL's trainer scores."""
    import torch

    device = next(model.parameters()).device
    width = max(len(answer["ids"]) for answer in answers)
    result = torch.full((len(prompts), width), float("nan"))
    for start in range(0, len(prompts), batch):
        heads, tails = prompts[start : start + batch], [a["ids"] for a in answers[start : start + batch]]
        left, right = max(map(len, heads)), max(map(len, tails))
        ids = torch.full((len(heads), left + right), pad)
        mask = torch.zeros_like(ids)
        for i, (head, tail) in enumerate(zip(heads, tails, strict=True)):
            ids[i, left - len(head) : left + len(tail)] = torch.tensor(head + tail)
            mask[i, left - len(head) : left + len(tail)] = 1
        with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        logps = torch.log_softmax(logits[:, left - 1 : -1].float(), dim=-1)
        chosen = logps.gather(2, ids[:, left:].to(device).unsqueeze(2)).squeeze(2).cpu()
        for i, tail in enumerate(tails):
            result[start + i, : len(tail)] = chosen[i, : len(tail)]
    return result


def run(options: argparse.Namespace) -> None:
    """Fill and print the table."""
    import torch
    from arithmetic.task import all_sums
    from arithmetic.warmup import warm_model
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
    from transformers import AutoTokenizer

    import swapq
    from swapq.diagnostics import measure_mismatch

    source = options.model or warm_model(ROOT / ".cache" / "arithmetic")
    tokenizer = AutoTokenizer.from_pretrained(source)
    prompts = [tokenizer(prompt)["input_ids"] for prompt, _ in all_sums()][: options.prompts] * options.repeat
    sampled: dict[str, list[dict[str, Any]]] = {}
    figures = []
    for row in track(ROWS, description="rollouts and scores", transient=True):
        if row.rollout not in sampled:
            with tempfile.TemporaryDirectory() as folder:
                swapq.export(converted(source, row.rollout).to(torch.bfloat16), folder)
                tokenizer.save_pretrained(folder)
                sampled[row.rollout] = sample(Path(folder), prompts, options.seed)
        answers = sampled[row.rollout]
        trainer_logps = score(converted(source, row.trainer), prompts, answers, tokenizer.pad_token_id)
        rollout_logps = torch.full_like(trainer_logps, float("nan"))
        for i, answer in enumerate(answers):
            rollout_logps[i, : len(answer["logps"])] = torch.tensor(answer["logps"])
        figures.append((row, measure_mismatch(trainer_logps, rollout_logps, ~torch.isnan(rollout_logps), clip_max=3.0)))

    floor = figures[0][1].abs_mean
    unmatched = figures[-1][1].abs_mean
    table = Table(title=f"Rollout against trainer, {figures[0][1].tokens} tokens, {source}")
    for title in ("pair", "mean |d|", "max |d|", "KL k3", "ESS", "of bf16", "of unmatched"):
        table.add_column(title, justify="left" if title == "pair" else "right")
    for row, figure in figures:
        table.add_row(
            row.label,
            f"{figure.abs_mean:.5f}",
            f"{figure.abs_max:.3f}",
            f"{figure.k3:.1e}",
            f"{figure.ess:.5f}",
            f"{figure.abs_mean / floor:.2f}",
            f"{figure.abs_mean / unmatched:.2f}",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if options.output is not None:
        rows = [{"pair": row.label, **dataclasses.asdict(figure)} for row, figure in figures]
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder (default: the main job's supervised start)")
    parser.add_argument("--prompts", type=int, default=400, help="number of different prompts (default: all 400)")
    parser.add_argument("--repeat", type=int, default=4, help="samples of each prompt (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="sampling seed (default: 0)")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    parser.add_argument("--sample", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sample is not None:
        serve(str(options.sample), options.seed)
    else:
        run(options)


if __name__ == "__main__":
    main()
