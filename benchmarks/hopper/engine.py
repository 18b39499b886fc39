"""Decode step and prefill of vLLM on 8 layers of Qwen3-30B-A3B's shape: stock BF16, stock NVFP4 (Marlin, weights only), stock FP8, swapq.

``mxfp8-experts`` is ``mxfp8-rl`` with attention and head left in BF16. Each engine is a process of its own with CUDA graphs and
torch.compile, as many at a time as there are GPUs; the checkpoints are synthetic and made here. A step is timed as a user sees it; "GPU
busy" beside it is what its kernels take, since from some speed on the engine's host loop is the slower of the two. vLLM runs its loop in a
process beside the caller's, as it does by itself; ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` puts both in one. Tokens are drawn greedily from a
vocabulary of 32,768: beside 8 layers the sampler of a full one would outweigh the experts.

    python -m benchmarks.hopper.engine [--engines bf16 nvfp4-rl] [--layers 24] [--checkpoints DIR, kept and used again]

A full model has 48 layers: the more layers, the less the host loop counts.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.hopper.needs import require
from benchmarks.hopper.timing import Row

BATCHES, STEPS, LAYERS, PREFILL, VOCABULARY = (1, 16, 64, 256), 128, 8, 8192, 32768
TARGETS = {
    "nvfp4-rl": {1: 1.0, 16: 0.75, 64: 0.65, 256: 0.55},
    "mxfp8-rl": {16: 0.85, 64: 0.78, 256: 0.70},
    "mxfp8-experts": {16: 0.85, 64: 0.78, 256: 0.70},
}
_TRACED = 16  # steps under the profiler
_REPEATS = 4  # of which the fastest counts
RIVALS = {
    "nvfp4-rl": ("marlin", "Marlin W4A16"),
    "mxfp8-rl": ("fp8", "stock FP8"),
    "mxfp8-experts": ("fp8", "stock FP8"),
}
_EXPERTS = {"routed_experts": "mxfp8"}
#: recipe, what is changed in it, and the layout of the checkpoint
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "bf16": ("bf16", {}, "swapq"),
    "nvfp4-rl": ("nvfp4-rl", {}, "swapq"),
    "marlin": ("nvfp4-rl", {}, "modelopt"),
    "mxfp8-rl": ("mxfp8-rl", {}, "swapq"),
    "mxfp8-experts": ("mxfp8-rl", {"weights": _EXPERTS, "activations": _EXPERTS}, "swapq"),
}
ENGINES = (*CHECKPOINTS, "fp8")


def make(folder: Path, engine: str, layers: int = LAYERS) -> None:
    """What an engine opens: a BF16 checkpoint, or a conversion of it; Marlin's holds the NVFP4 codes in ModelOpt's layout."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import swapq

    config = Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=VOCABULARY,
        norm_topk_prob=True, tie_word_embeddings=False, max_position_embeddings=16384,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    if engine == "bf16":
        model.save_pretrained(folder / engine)
        return
    recipe, changes, layout = CHECKPOINTS[engine]
    swapq.convert(model, recipe, last_layers_bf16=0, **changes)
    swapq.export(model, folder / engine, layout=layout)


def covered(spans: Sequence[tuple[int, int]]) -> int:
    """Length of the union of intervals: kernels may overlap."""
    total, end = 0, -1
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


class Traced:
    """What vLLM adds to its worker, in whichever process that is: a profiler of kernels."""

    def start_trace(self) -> None:
        self._trace = profile(activities=[ProfilerActivity.CUDA])
        self._trace.start()

    def stop_trace(self) -> float:
        """Seconds in which at least one kernel ran."""
        torch.cuda.synchronize()
        self._trace.stop()
        events = self._trace.profiler.kineto_results.events()  # type: ignore[union-attr]
        spans = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.device_type() == DeviceType.CUDA]
        return covered(spans) * 1e-9


def _checkpoint(engine: str) -> str:
    return "bf16" if engine == "fp8" else engine


def measure(folder: Path, engine: str) -> None:
    """What one engine process prints: seconds of a decode step by batch, and of a prefill."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"quantization": "fp8"} if engine == "fp8" else {}
    llm = LLM(
        model=str(folder / _checkpoint(engine)), skip_tokenizer_init=True, max_model_len=PREFILL + 64,
        max_num_seqs=256, max_num_batched_tokens=PREFILL + 64, gpu_memory_utilization=0.6, enable_prefix_caching=False,
        compilation_config={"cudagraph_capture_sizes": list(BATCHES)},
        worker_extension_cls=f"benchmarks.hopper.engine.{Traced.__name__}", **options,
    )  # fmt: skip

    def run(prompts: list[dict[str, list[int]]], tokens: int) -> float:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    def gpu_seconds(prompts: list[dict[str, list[int]]], tokens: int) -> float:
        llm.collective_rpc("start_trace")
        run(prompts, tokens)
        return llm.collective_rpc("stop_trace")[0]

    found: dict[str, float] = {}
    for batch in BATCHES:
        prompts = [
            {"prompt_token_ids": [(i * 131 + j * 17) % (VOCABULARY - 1) + 1 for j in range(16)]} for i in range(batch)
        ]
        run(prompts, 4)
        long, short = (min(run(prompts, tokens) for _ in range(_REPEATS)) for tokens in (STEPS + 1, 1))
        found[str(batch)] = (long - short) / STEPS
        few, one = (gpu_seconds(prompts, tokens) for tokens in (_TRACED + 1, 1))
        found[f"gpu {batch}"] = (few - one) / _TRACED
    prompt = [{"prompt_token_ids": [(j * 7919) % (VOCABULARY - 1) + 1 for j in range(PREFILL)]}]
    run(prompt, 1)
    found["prefill"] = min(run(prompt, 1) for _ in range(_REPEATS))
    print("FOUND " + json.dumps(found), flush=True)


class _Gpus:
    """Runs each call in a process of its own, on a GPU that no other has."""

    def __init__(self) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        names = visible.split(",")
        self.count = len(names)
        self._free: queue.Queue[str] = queue.Queue()
        for gpu in names:
            self._free.put(gpu)

    def __call__(self, *arguments: str) -> str:
        gpu = self._free.get()
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "CUDA_VISIBLE_DEVICES": gpu,
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.hopper.engine", *arguments]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        finally:
            self._free.put(gpu)
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stderr[-3000:]}")
        return done.stdout


def _measured(folder: Path, engines: Sequence[str], layers: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    gpus = _Gpus()
    folder.mkdir(parents=True, exist_ok=True)
    missing = [c for c in dict.fromkeys(map(_checkpoint, engines)) if not (folder / c / "config.json").is_file()]
    with ThreadPoolExecutor(gpus.count) as pool:
        list(
            pool.map(lambda name: gpus("--make", name, "--checkpoints", str(folder), "--layers", str(layers)), missing)
        )
        for engine, future in [(e, pool.submit(gpus, "--measure", e, "--checkpoints", str(folder))) for e in engines]:
            try:
                line = next(x for x in future.result().splitlines() if x.startswith("FOUND "))
            except RuntimeError as error:
                print(f"{engine} did not run: {error}", file=sys.stderr)
                continue
            found[engine] = json.loads(line[6:])
            print(engine, {k: round(v * 1e3, 3) for k, v in found[engine].items()}, flush=True)
    return found


def rows(engines: Sequence[str] = ENGINES, layers: int = LAYERS, checkpoints: Path | None = None) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="swapq-engine-") as folder:
        found = _measured(checkpoints or Path(folder), engines, layers)
    for recipe, targets in TARGETS.items():
        if recipe not in found or "bf16" not in found:
            continue
        rival, name = RIVALS[recipe]
        for what in (*map(str, BATCHES), "prefill"):
            ours, bf16 = found[recipe][what] * 1e3, found["bf16"][what] * 1e3
            target = 1.25 if what == "prefill" else targets.get(int(what))
            work = f"prefill of {PREFILL} tokens" if what == "prefill" else f"decode step, batch {what}"
            other = found.get(rival, {}).get(what)
            notes = [f"{name} {other * 1e3:.2f} ms"] if other else []
            busy = [found[e][f"gpu {what}"] * 1e3 for e in (recipe, "bf16") if f"gpu {what}" in found[e]]
            notes += [f"GPU busy {busy[0]:.2f} / {busy[1]:.2f} ms = {busy[0] / busy[1]:.2f}"] if len(busy) == 2 else []
            yield Row(
                f"{work}, {recipe}", ours, bf16, "ms", ours / bf16, f"<= {target}" if target else "-",
                target is None or ours / bf16 <= target, "; ".join(notes),
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode step and prefill of vLLM beside stock engines.")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--checkpoints", type=Path, help="folder that keeps what the engines open")
    for job in ("--make", "--measure"):
        parser.add_argument(job, choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(options.checkpoints, options.make, options.layers)
    elif options.measure:
        measure(options.checkpoints, options.measure)
    else:  # not in the processes that it starts: one that has looked for CUDA devices must not fork vLLM's
        require(parser, vllm="every engine")
        for row in rows(options.engines, options.layers, options.checkpoints):
            print(row.line())


if __name__ == "__main__":
    main()
