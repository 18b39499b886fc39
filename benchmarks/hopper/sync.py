"""Weight sync of a whole model into a colocated engine: codes and scales, verified, beside BF16 ``load_weights`` of the same model.

Each engine shares a process with its trainer's model, one process after the other. 8 layers of Qwen3-30B-A3B's shape on a GPU; without one
a tiny model walks the same code, whose times say nothing about a GPU: ``python -m benchmarks.hopper.sync``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.hopper.needs import require
from benchmarks.hopper.timing import Row

ENGINES = ("bf16", "nvfp4-rl", "mxfp8-rl")
TARGETS = {"nvfp4-rl": (0.35, 0.29)}
REPEATS = 5
_LARGE = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
_TINY = {
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_experts": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
}  # fmt: skip

Tensors = Iterable[tuple[str, Tensor]]


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _seconds(work: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """First run, and the fastest of the others."""
    times = []
    for _ in range(repeats + 1):
        _wait()
        start = time.perf_counter()
        work()
        _wait()
        times.append(time.perf_counter() - start)
    return [times[0], min(times[1:])]


def _model() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = _LARGE if torch.cuda.is_available() else _TINY
    torch.manual_seed(0)
    with torch.device(_device()):
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(norm_topk_prob=True, tie_word_embeddings=False, **sizes)).to(
            torch.bfloat16
        )


def _engine(folder: str, **options: Any) -> Any:
    from vllm import LLM

    if torch.cuda.is_available():
        options["gpu_memory_utilization"] = 0.5
    return LLM(model=folder, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8, enforce_eager=True, **options)


def _measure_bf16(folder: str) -> dict[str, Any]:
    """``load_weights`` of every tensor, experts fused as the trainer holds them and one by one as a checkpoint does."""
    from transformers.core_model_loading import revert_weight_conversion

    model = _model()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    llm = _engine(folder, load_format="dummy")
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    live = runner.model
    fused = dict(model.state_dict())
    single = dict(revert_weight_conversion(model, dict(fused)))
    found: dict[str, Any] = {
        "bytes": sum(t.nbytes for t in fused.values()),
        "expert_bytes": sum(t.nbytes for n, t in fused.items() if ".experts." in n),
    }

    def load(tensors: Tensors) -> None:
        if torch.cuda.is_available():
            live.load_weights(tensors)
        else:  # vLLM's CPU engine drops the loaders of packed weights, so that only a reload can load again
            runner.reload_weights(weights_iterator=iter(tensors))

    with torch.no_grad():
        found["fused"] = _seconds(lambda: load(fused.items()))
        found["single"] = _seconds(lambda: load(single.items()))
    return found


def _measure_ours(folder: str, recipe: str) -> dict[str, Any]:
    """One verified update after the other, from masters to an engine that serves."""
    import swapq
    from swapq.digest import Digests
    from swapq_trl.sending import sent_tensors, with_digests
    from swapq_vllm.receiver import apply_update, stacked_experts

    model = swapq.convert(_model(), recipe, last_layers_bf16=0)
    swapq.export(model, folder)
    llm = _engine(folder)
    stacked = stacked_experts(llm)
    expert_bytes, reports = 0, []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        return sent_tensors(model, torch.bfloat16, stacked=stacked, fresh=False)

    def sync() -> None:
        digests = Digests()
        reports.append(apply_update(llm, with_digests(tensors(), digests), digests))

    def send() -> None:
        nonlocal expert_bytes
        expert_bytes = sum(t.nbytes for n, t in tensors() if ".experts." in n)

    found: dict[str, Any] = {"sync": _seconds(sync), "quantize": _seconds(send)}
    report = reports[-1]
    if report.verified != report.tensors or report.unverified:
        raise RuntimeError(f"{report.tensors - report.verified} tensors of the update were not verified")
    return found | {"bytes": report.bytes, "expert_bytes": expert_bytes, "tensors": report.tensors}


def _in_process(engine: str) -> dict[str, Any]:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.hopper.sync", "--measure", engine]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{engine}: {done.stderr[-3000:]}")
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))[6:])


def rows(recipes: Sequence[str] = ENGINES[1:]) -> Iterator[Row]:
    rival = _in_process("bf16")
    style = min(("fused", "single"), key=lambda s: rival[s][1])
    loader = "load_weights" if torch.cuda.is_available() else "reload_weights"
    for recipe in recipes:
        ours = _in_process(recipe)
        time_target, byte_target = TARGETS.get(recipe, (None, None))
        mine, theirs = ours["sync"][1] * 1e3, rival[style][1] * 1e3
        note = (
            f"of which quantizing {ours['quantize'][1] * 1e3:.0f} ms; first sync {ours['sync'][0] * 1e3:.0f} ms; BF16 {loader} "
            f"fused {rival['fused'][1] * 1e3:.0f} ms, one by one {rival['single'][1] * 1e3:.0f} ms"
        )
        yield _row(f"verified sync of the whole model, {recipe}", mine, theirs, "ms", time_target, note)
        for what, key, target in (("all experts", "expert_bytes", byte_target), ("the whole model", "bytes", None)):
            yield _row(f"bytes of {what}, {recipe}", ours[key] / 1e6, rival[key] / 1e6, "MB", target, "")


def _row(work: str, ours: float, rival: float, unit: str, target: float | None, note: str) -> Row:
    ratio = ours / rival
    return Row(work, ours, rival, unit, ratio, f"<= {target}" if target else "-", not target or ratio <= target, note)


def _measure(engine: str) -> None:
    with tempfile.TemporaryDirectory(prefix="swapq-sync-") as folder:
        found = _measure_bf16(folder) if engine == "bf16" else _measure_ours(str(Path(folder) / "export"), engine)
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Verified weight sync beside BF16 load_weights.")
    parser.add_argument("recipes", nargs="*", default=ENGINES[1:], metavar="recipe", help=" or ".join(ENGINES[1:]))
    parser.add_argument("--measure", choices=ENGINES, help="one side alone, in this process")
    options = parser.parse_args()
    if unknown := set(options.recipes) - set(ENGINES[1:]):
        parser.error(f"{', '.join(sorted(unknown))} is not measured; {' and '.join(ENGINES[1:])} are")
    require(parser, cuda=False, vllm="either side of the sync")
    if options.measure:
        _measure(options.measure)
    else:
        for row in rows(options.recipes):
            print(row.line(), flush=True)
