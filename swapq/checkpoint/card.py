"""The model card of a quantized folder, written from its own record, its plan and its verification: no number that was not measured."""

import os
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from swapq._version import __version__
from swapq.checkpoint.described import Described, describe_folder
from swapq.checkpoint.record import copied_files, read_record
from swapq.checkpoint.verify import Verification, verify
from swapq.checkpoint.writer import write_text
from swapq.errors import CheckpointError
from swapq.headers import Folder, read_folder
from swapq.recipe import Recipe

__all__ = ["check_base_model", "model_card", "replaced", "write_card"]

_MADE_BY = "Made by swapq"
_FORMATS = {
    "nvfp4": "NVFP4 (E2M1 codes, one E4M3 scale per 16, one FP32 scale per expert; gate and up share it)",
    "mxfp8": "MXFP8 (E4M3 codes, one E8M0 scale per 32)",
    "fp8_block": "FP8 block (E4M3 codes, one FP32 scale per 128x128)",
    "int4": "INT4 (symmetric, one BF16 scale per 128; activations stay BF16)",
    "int4_g32": "INT4 (symmetric, one BF16 scale per 32; activations stay BF16)",
    "nvfp4_tile": "NVFP4 in tiles (E2M1 codes, one E4M3 scale per 16x16, one FP32 scale per expert)",
}
_LOADERS = {
    "swapq": "Stock transformers after `import swapq`, and vLLM with the swapq plugin installed, open it by its config alone.",
    "modelopt": "Stock vLLM, SGLang and TensorRT-LLM read it as a ModelOpt checkpoint. `input_scale` is the neutral 1.0.",
    "compressed-tensors": "Stock vLLM reads it as a compressed-tensors checkpoint. `input_global_scale` is the neutral 1.0.",
}


def check_base_model(base_model: str | None) -> None:
    """Refuse a base model that is a folder or otherwise no ``owner/name``.

    Raises:
        CheckpointError: with the name.
    """
    if base_model is not None and (
        base_model.count("/") != 1 or base_model.startswith((".", "/")) or "\\" in base_model
    ):
        raise CheckpointError(f"base_model is {base_model!r}; name the repository on the Hub, owner/name, not a folder")


def model_card(
    directory: "str | os.PathLike[str]",
    *,
    base_model: str | None = None,
    source: "str | os.PathLike[str] | None" = None,
    command: str | None = None,
    license: str | None = None,
) -> str:
    """The text of ``README.md``: YAML front matter and what a user of the folder wants to know.

    Args:
        directory: a quantized folder that verifies.
        base_model: the base model's repository on the Hub, ``owner/name``.
        source: the folder it was made from; adds measured errors.
        command: the exact command that made it.
        license: identifier of the license, as the Hub spells it.

    Raises:
        CheckpointError: the folder does not verify, or base_model is a path.
    """
    check_base_model(base_model)
    folder = read_folder(directory)
    described = describe_folder(folder)
    report = verify(directory, source=source)
    if not report.ok:
        raise CheckpointError(
            f"{directory}: does not verify ({report.problems[0]}); a card would promise what is not there"
        )
    formats = sorted(set(described.quantized.values()))
    relation: dict[str, Any] = {"base_model_relation": "quantized"} if base_model else {}
    data = ModelCardData(
        base_model=base_model,
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["swapq", "moe", "quantized", *formats],
        **relation,
    )
    parts = [
        "---",
        data.to_yaml(),
        "---",
        "",
        *_body(described, report, formats, base_model, command, _expanded(folder)),
    ]
    return "\n".join(parts) + "\n"


def _body(
    described: Described,
    report: Verification,
    formats: list[str],
    base_model: str | None,
    command: str | None,
    expanded: list[str],
) -> list[str]:
    totals = report.totals
    title = f"# {base_model or described.config.get('model_type', 'model')}, {' and '.join(f.upper() for f in formats) or 'BF16'}"
    lines = [title, "", f"{_MADE_BY} {__version__}.", "", "## What is quantized", ""]
    lines += [f"- {_FORMATS[f]}: {_count(described, f)}" for f in formats] or ["- nothing"]
    lines += ["- everything else, routers, embeddings and head included, is bit-identical to the source", *expanded, ""]
    if described.recipe is not None:
        r = described.recipe
        lines += [
            f"Recipe `{r.name}`: activations {_activations(r)}, first layers in BF16: {r.first_layers_bf16}, last layers in BF16: "
            f"{r.last_layers_bf16}, also kept: {', '.join(r.keep_bf16) or 'nothing more'}, expert tensor-parallel size {r.expert_tp}. "
            f"{r.policies[0].upper()}{r.policies[1:]}.",
            "",
        ]
    lines += ["## Size", "", "| | |", "|---|---|"]
    lines += [
        f"| bytes of tensors | {totals['bytes']:,} |",
        f"| parameters | {totals['parameters']:,} |",
        f"| bits per parameter | {totals['bits_per_parameter']:.2f} |",
        "",
    ]
    lines += _errors(report)
    lines += [
        "## Next-token layers, KV cache",
        "",
        _mtp(described),
        "The KV cache is not quantized by this checkpoint.",
        "",
    ]
    lines += ["## How to load", "", _LOADERS.get(described.layout, ""), ""]
    if command:
        lines += ["## How it was made", "", "```", command, "```", ""]
    return lines


def _expanded(folder: Folder) -> list[str]:
    """What a conversion of a block-FP8 source did to the weights that it did not quantize."""
    source = (read_record(folder.path) or {}).get("source")
    count = source.get("dequantized") if isinstance(source, dict) else None
    return (
        [f"- but for {count} weights that are FP8 in the source: dequantized exactly, rounded to BF16"] if count else []
    )


def _activations(recipe: Recipe) -> str:
    if isinstance(recipe.activations, str):
        return f"`{recipe.activations}`"
    return ", ".join(f"`{recipe.activations_of(role)}` before {role}" for role in recipe.weights)


def _count(described: Described, fmt: str) -> str:
    names = [n for n, f in described.quantized.items() if f == fmt]
    layers = sorted({int(p) for n in names for p in n.split(".") if p.isdigit() and f"layers.{p}." in n})
    where = f", layers {layers[0]} to {layers[-1]}" if layers else ""
    return f"{len(names)} weights{where}"


def _errors(report: Verification) -> list[str]:
    roles: dict[str, Any] = report.totals.get("by_role", {})
    if not roles:
        return []
    lines = ["## Error against the source", "", "| role | relative error | SQNR |", "|---|---|---|"]
    for role, row in roles.items():
        sqnr = "lossless" if row["sqnr_db"] is None else f"{row['sqnr_db']:.2f} dB"
        lines.append(f"| {role} | {row['rel_error']:.5f} | {sqnr} |")
    return [*lines, "", f"Non-zero blocks that underflow to zeros: {report.totals['underflowed_blocks']}.", ""]


def _mtp(described: Described) -> str:
    layers = described.config.get("num_nextn_predict_layers") or described.config.get("mtp_num_hidden_layers")
    return f"{layers} next-token layer(s) are kept as they are." if layers else "The config names no next-token layers."


def replaced(directory: "str | os.PathLike[str]") -> str:
    """What a card that is written now replaces, in a sentence; empty where there is none, or one of swapq's own."""
    path = Path(directory) / "README.md"
    if not path.is_file() or _MADE_BY in path.read_text(encoding="utf-8", errors="replace"):
        return ""
    whose = (
        "the source's, copied by the conversion" if path.name in copied_files(path.parent) else "not written by swapq"
    )
    return f"{path} was there before ({whose}) and is replaced by the card; the base model's own card stays with its source"


def write_card(directory: "str | os.PathLike[str]", **options: Any) -> Path:
    """Write :func:`model_card` to ``README.md`` of the folder."""
    path = Path(directory) / "README.md"
    write_text(path, model_card(directory, **options))
    return path
