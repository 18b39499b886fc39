"""Decode step and prefill of vLLM on 8 layers of Qwen3-30B-A3B's shape: stock BF16, stock NVFP4 (Marlin, weights only) and swapq.

Each engine is a process of its own with CUDA graphs and torch.compile; the checkpoints are synthetic and made here.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.hopper.timing import Row

BATCHES, STEPS, LAYERS, PREFILL = (1, 16, 64, 256), 128, 8, 8192
TARGETS = {
    "nvfp4-rl": {1: 1.0, 16: 0.75, 64: 0.65, 256: 0.55},
    "mxfp8-rl": {16: 0.85, 64: 0.78, 256: 0.70},
}
ENGINES = ("bf16", "nvfp4-rl", "marlin", "mxfp8-rl")


def make(folder: Path, engines: Sequence[str] = ENGINES) -> None:
    """A BF16 checkpoint and its exports: swapq's NVFP4 and MXFP8, and the same NVFP4 codes in ModelOpt's layout."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import swapq

    config = Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936,
        norm_topk_prob=True, tie_word_embeddings=False, max_position_embeddings=16384,
    )  # fmt: skip
    for engine in engines:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
        if engine == "bf16":
            model.save_pretrained(folder / engine)
            continue
        swapq.convert(model, "nvfp4-rl" if engine == "marlin" else engine, last_layers_bf16=0)
        swapq.export(model, folder / engine, layout="modelopt" if engine == "marlin" else "swapq")
        del model


def measure(folder: str) -> None:
    """What one engine process prints: seconds of a decode step by batch, and of a prefill."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder, skip_tokenizer_init=True, max_model_len=PREFILL + 64, max_num_seqs=256, max_num_batched_tokens=PREFILL + 64,
        gpu_memory_utilization=0.6, enable_prefix_caching=False, compilation_config={"cudagraph_capture_sizes": list(BATCHES)},
    )  # fmt: skip

    def run(prompts: list[dict[str, list[int]]], tokens: int) -> float:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1.0, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    found: dict[str, float] = {}
    for batch in BATCHES:
        prompts = [{"prompt_token_ids": [(i * 131 + j * 17) % 150000 + 1 for j in range(16)]} for i in range(batch)]
        run(prompts, 4)
        found[str(batch)] = min(run(prompts, STEPS + 1) - run(prompts, 1) for _ in range(2)) / STEPS
    long = [{"prompt_token_ids": [(j * 7919) % 150000 + 1 for j in range(PREFILL)]}]
    run(long, 1)
    found["prefill"] = min(run(long, 1) for _ in range(3))
    print("FOUND " + json.dumps(found), flush=True)


def _in_process(*arguments: str) -> str:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.hopper.engine", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr[-3000:]}")
    return done.stdout


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="swapq-engine-") as folder:
        _in_process("--make", folder)
        found = {}
        for engine in ENGINES:
            try:
                line = next(
                    x for x in _in_process("--measure", f"{folder}/{engine}").splitlines() if x.startswith("FOUND ")
                )
            except RuntimeError as error:
                print(f"{engine} did not run: {error}", file=sys.stderr)
                continue
            found[engine] = json.loads(line[6:])
            print(engine, {k: round(v * 1e3, 3) for k, v in found[engine].items()}, flush=True)
    for recipe, targets in TARGETS.items():
        if recipe not in found or "bf16" not in found:
            continue
        for batch in map(str, BATCHES):
            ours, bf16 = found[recipe][batch] * 1e3, found["bf16"][batch] * 1e3
            target = targets.get(int(batch))
            marlin = found.get("marlin", {}).get(batch)
            note = f"Marlin W4A16 {marlin * 1e3:.2f} ms" if marlin and recipe == "nvfp4-rl" else ""
            met = target is None or ours / bf16 <= target
            yield Row(
                f"decode step, batch {batch}, {recipe}",
                ours,
                bf16,
                "ms",
                ours / bf16,
                f"<= {target}" if target else "-",
                met,
                note,
            )
        ours, bf16 = found[recipe]["prefill"] * 1e3, found["bf16"]["prefill"] * 1e3
        yield Row(
            f"prefill of {PREFILL} tokens, {recipe}", ours, bf16, "ms", ours / bf16, "<= 1.25", ours / bf16 <= 1.25
        )


if __name__ == "__main__":
    make(Path(sys.argv[2]), sys.argv[3:] or ENGINES) if sys.argv[1] == "--make" else measure(sys.argv[2])
