"""Checkpoint conversion beside `cp -r` and two other converters: wall time, bytes, peak memory, and whether the result is right.

    python benchmarks/convert.py --layers 4 --peers /path/to/peers

Each row is a process of its own on the same synthetic checkpoint of Qwen3-30B-A3B's shape. Imports (of swapq: with the machine code of
its loops, compiled once on a machine) are outside the measured part, for everybody alike, and have a column of their own. `cp` and
swapq run in turn, `--rounds` times, and the best time of each counts; the other converters run once. `--peers` is a folder that holds
llmcompressor, its compressed-tensors and fireworks-prequant (`pip install --no-deps --target`); without it only `cp` and swapq run.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file

HIDDEN, INNER, EXPERTS, VOCAB = 2048, 768, 128, 1000
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INNER,
    "intermediate_size": 6144,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": VOCAB,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
}
MEASURE = """
import json, sys, time
def io():
    return {k: int(v) for k, v in (line.split(": ") for line in open("/proc/self/io"))}
start = time.perf_counter()
IMPORTS
imported, before, start = time.perf_counter() - start, io(), time.perf_counter()
JOB
seconds, after = time.perf_counter() - start, io()
print("RESULT " + json.dumps({
    "import": imported,
    "seconds": seconds,
    "read": after["rchar"] - before["rchar"],
    "written": after["wchar"] - before["wchar"],
    "peak": 1024 * int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))),
}))
"""
SWAPQ_IMPORTS = """
import swapq, swapq.checkpoint.conversion
from swapq.kernels import cpu
cpu.prepare()
"""
SWAPQ = """
recipe = swapq.Recipe.named({recipe!r}, last_layers_bf16=0)
swapq.convert_checkpoint({src!r}, {dst!r}, recipe, workers={workers}, progress=False)
"""
COMPRESSOR_IMPORTS = "from llmcompressor import model_free_ptq"
COMPRESSOR = """
model_free_ptq(model_stub={src!r}, save_directory={dst!r}, scheme="NVFP4A16", max_workers={workers}, device="cpu",
               ignore=["re:.*gate$", "lm_head", "re:.*self_attn.*", "re:.*norm.*", "re:.*embed_tokens.*"])
"""
FIREWORKS_IMPORTS = "from fireworks_prequant import quantize_checkpoint_dir"
FIREWORKS = """
quantize_checkpoint_dir({src!r}, {dst!r}, fmt="nvfp4", device="cpu", num_workers={workers})
"""


def tensors(layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).to(torch.bfloat16)

    yield "model.embed_tokens.weight", draw(VOCAB, HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{norm}.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)
        for name, n, k in (("q", 4096, HIDDEN), ("k", 512, HIDDEN), ("v", 512, HIDDEN), ("o", HIDDEN, 4096)):
            yield f"{prefix}self_attn.{name}_proj.weight", draw(n, k)
        for norm in ("q_norm", "k_norm"):
            yield f"{prefix}self_attn.{norm}.weight", torch.ones(128, dtype=torch.bfloat16)
        yield f"{prefix}mlp.gate.weight", draw(EXPERTS, HIDDEN)
        shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
        drawn = {name: draw(*shape) for name, shape in shapes.items()}
        for expert in range(EXPERTS):
            for name, base in drawn.items():  # one draw, shifted and scaled: each expert has an amax of its own
                yield (
                    f"{prefix}mlp.experts.{expert}.{name}.weight",
                    (base.roll(expert) * (1 + expert / 97)).to(torch.bfloat16),
                )
    yield "model.norm.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)
    yield "lm_head.weight", draw(VOCAB, HIDDEN)


def make(folder: Path, layers: int, shard: int = 1 << 30) -> None:
    """Write the synthetic checkpoint in shards of about ``shard`` bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    groups: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}

    def flush() -> None:
        groups.append(list(held))
        save_file(held, folder / f"{len(groups)}.tmp", metadata={"format": "pt"})
        held.clear()

    for name, tensor in tensors(layers):
        if held and sum(2 * t.numel() for t in held.values()) + 2 * tensor.numel() > shard:
            flush()
        held[name] = tensor.contiguous()
    flush()
    files = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    for i, file in enumerate(files, 1):
        (folder / f"{i}.tmp").rename(folder / file)
    weight_map = {name: file for file, names in zip(files, groups, strict=True) for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def run(imports: str, code: str, folder: str | None, seconds: int) -> dict[str, float | str]:
    """One measured process. Peak memory of child processes is not in it, so peers run with workers in one process where they can."""
    os.sync()  # what an earlier row left to be written is not this row's work
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if folder:
        environment["PYTHONPATH"] = folder
    script = MEASURE.replace("IMPORTS", imports).replace("JOB", code.strip())
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not finished in {seconds} s"}
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    return (
        json.loads(line[7:])
        if line
        else {"error": done.stderr.strip().splitlines()[-1][:110] if done.stderr else "no result"}
    )


def copy(src: str, dst: str) -> dict[str, float | str]:
    """`cp -r`, measured."""
    os.sync()
    start = time.perf_counter()
    subprocess.run(["cp", "-r", src, dst], check=True)
    return {"seconds": time.perf_counter() - start}


def faster(row: dict[str, float | str], before: dict[str, float | str] | None) -> dict[str, float | str]:
    """The better of two rounds."""
    if before is None or "error" in before:
        return row
    return before if "error" in row or float(before["seconds"]) <= float(row["seconds"]) else row


def unequal_pairs(folder: Path) -> str:
    """How many gate/up pairs have FP32 scales that differ, whoever named them."""
    scales: dict[str, dict[str, float]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  not a dictionary
                if name.endswith(("weight_scale_2", "weight_global_scale")) and (
                    ".gate_proj." in name or ".up_proj." in name
                ):
                    head, _, tail = name.partition(".gate_proj." if ".gate_proj." in name else ".up_proj.")
                    scales.setdefault(head, {})[name[len(head) :] + tail] = float(opened.get_tensor(name).flatten()[0])
    pairs = [list(v.values()) for v in scales.values() if len(v) == 2]
    return f"{sum(a != b for a, b in pairs)} of {len(pairs)}" if pairs else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--peers", help="folder with the other converters")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--recipes", nargs="+", default=["nvfp4-rl", "mxfp8-rl", "fp8-block-rl", "int4-qat"])
    parser.add_argument("--rounds", type=int, default=3, help="how often cp and swapq run in turn")
    parser.add_argument("--limit", type=int, default=600, help="seconds that one row may take")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=150)
    with tempfile.TemporaryDirectory(prefix="swapq-bench-") as folder:
        root = Path(folder)
        with console.status("writing the synthetic checkpoint"):
            make(root / "src", options.layers)
        size = sum(p.stat().st_size for p in (root / "src").iterdir())
        src, dst = str(root / "src"), str(root / "dst")
        rows: dict[str, dict[str, float | str]] = {}
        ours = {
            f"swapq {recipe}, {workers} worker{'s' * (workers > 1)}": SWAPQ.format(
                recipe=recipe, src=src, dst=dst, workers=workers
            )
            for recipe in options.recipes
            for workers in sorted({1, options.workers})
        }
        peers = {}
        if options.peers:
            peers["llm-compressor model_free_ptq NVFP4A16"] = (
                COMPRESSOR_IMPORTS,
                COMPRESSOR.format(src=src, dst=dst, workers=options.workers),
            )
            peers["fireworks-prequant nvfp4, 1 worker"] = (
                FIREWORKS_IMPORTS,
                FIREWORKS.format(src=src, dst=dst, workers=1),
            )
        for _ in range(options.rounds):
            rows["cp -r"] = faster(copy(src, dst) | {"read": size, "written": size}, rows.get("cp -r"))
            shutil.rmtree(dst)
            for name, code in ours.items():
                with console.status(name):
                    row = run(SWAPQ_IMPORTS, code, None, options.limit)
                    rows[name] = faster(row | {"unequal gate/up scales": unequal_pairs(Path(dst))}, rows.get(name))
                shutil.rmtree(dst, ignore_errors=True)
        for name, (imports, code) in peers.items():
            with console.status(name):
                row = run(imports, code, options.peers, options.limit)
                rows[name] = row | {"unequal gate/up scales": unequal_pairs(Path(dst))}
            shutil.rmtree(dst, ignore_errors=True)
    table = Table(
        title=f"{size / 1e9:.2f} GB of BF16, {options.layers} layers x {EXPERTS} experts, {os.cpu_count()} cores"
    )
    for column in (
        "",
        "seconds",
        "GB/s of input",
        "of cp",
        "read GB",
        "written GB",
        "peak MB",
        "import s",
        "unequal gate/up scales",
    ):
        table.add_column(column, justify="left" if not column else "right")
    base = float(rows["cp -r"]["seconds"])
    for name, row in rows.items():
        if "error" in row:
            table.add_row(name, str(row["error"]))
            continue
        seconds = float(row["seconds"])
        figures = [f"{seconds:.1f}", f"{size / seconds / 1e9:.2f}", f"{base / seconds:.2f}"]
        figures += [f"{float(row[k]) / 1e9:.2f}" for k in ("read", "written")]
        table.add_row(
            name,
            *figures,
            f"{float(row['peak']) / 1e6:.0f}" if "peak" in row else "-",
            f"{float(row['import']):.1f}" if "import" in row else "-",
            str(row.get("unequal gate/up scales", "-")),
        )
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps({"bytes": size, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
