"""``swapq.verify``: does a quantized folder hold what it says, whole and sound, and, beside its source, the very bytes it should.

It raises nothing about the folder: every fault is a line in ``problems``. A source that cannot be read is no fault of the folder.
"""

import filecmp
import math
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from swapq import formats
from swapq.anatomy.names import role_of
from swapq.checkpoint import layouts
from swapq.checkpoint.described import Described, describe_folder, incomplete_experts
from swapq.checkpoint.layouts import Layout, Stored
from swapq.checkpoint.recompute import compare
from swapq.checkpoint.record import RECORD_NAME, SCRATCH_NAME, copied_files, read_record, record_faults, sha256_of
from swapq.checkpoint.source import SourceFiles
from swapq.errors import SwapqError
from swapq.headers import Folder, TensorHeader, read_folder, shown

__all__ = ["Verification", "verify"]

#: codes that share one element of a packed tensor
_PER_ELEMENT = {torch.uint8: 2, torch.int32: 8}
#: what a module may hold beside its weight without being a parameter
_BESIDE = ("input_scale", "input_global_scale", "weight_shape")


@dataclass
class Verification:
    """What verify found.

    Attributes:
        problems: one sentence each, naming the tensor or file; empty means that all is well.
        tensors: checkpoint name of each weight -> role, format and, with a source, rel_error, sqnr_db and underflowed_blocks.
        totals: bytes, parameters, bits per parameter, counts and, with a source, errors by role.
        notes: what could not be checked, and why.
    """

    problems: list[str] = field(default_factory=list)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    totals: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "ok": self.ok,
            "problems": self.problems,
            "tensors": self.tensors,
            "totals": self.totals,
            "notes": self.notes,
        }


def verify(
    directory: "str | os.PathLike[str]", *, source: "str | os.PathLike[str] | None" = None, progress: bool = False
) -> Verification:
    """Check a quantized folder: config against headers, completeness, shard hashes, scales, pairs.

    Args:
        directory: layout ``swapq``, ``modelopt`` or ``compressed-tensors``.
        source: the folder it was made from: every tensor is computed again and compared bit for bit, and errors are measured.
        progress: show bars on stderr.

    Raises:
        CheckpointError: the source is no folder, damaged or incomplete.
    """
    report = Verification()
    origin = read_folder(source) if source is not None else None
    try:
        folder = read_folder(directory)
        described = describe_folder(folder)
    except (SwapqError, OSError) as error:
        report.problems.append(str(error))
        return report
    if (folder.path / SCRATCH_NAME).exists():
        _scratch(folder, report)
    if described.layout == "none":
        report.problems.append("config.json: has no quantization_config; the folder claims no quantization")
    layout = layouts.get(described.layout) if described.layout != "none" else layouts.get("swapq")
    strays = {p.name for p in folder.path.glob("*.safetensors")} - set(folder.files)
    report.problems += [
        f"{shown(name)}: lies beside the shards, and some readers load every file" for name in sorted(strays)
    ]
    known = _structure(folder, described, layout, report)
    try:
        entry = described.config.get("quantization_config") or {}
        report.problems.extend(layout.contradictions(entry, folder.path))
    except SwapqError as error:
        report.problems.append(str(error))
    files = SourceFiles(folder.path)
    try:
        _hashes(folder, report, progress)
        _values(folder, described, layout, known, files, report, progress)
        if origin is not None:
            compare(folder, described, layout, origin, files, report.tensors, report.problems, report.totals, progress)
            _copies(folder, origin, report)
    except (SwapqError, OSError) as error:
        report.problems.append(str(error))
    finally:
        files.close()
    _totals(folder, described, layout, report)
    return report


def _scratch(folder: Folder, report: Verification) -> None:
    """A record is written last and removed first: where it is, the command that left the scratch folder was at its end or had removed
    nothing yet."""
    if os.path.lexists(folder.path / RECORD_NAME):
        report.notes.append(
            f"{SCRATCH_NAME}: a command that was stopped left it, and the folder is whole; the same command removes it"
        )
    else:
        report.problems.append(
            f"{SCRATCH_NAME}: an unfinished conversion or export left it; run the same command again to finish it"
        )


def _structure(folder: Folder, described: Described, layout: Layout, report: Verification) -> dict[str, list[Stored]]:
    """Config against headers, both ways. The tensors of each quantized weight that is there as promised."""
    known: dict[str, list[Stored]] = {}
    owned: set[str] = set()
    for weight, fmt in described.quantized.items():
        if fmt not in layout.formats:
            report.problems.append(f"{weight}: listed as {fmt}, which layout {layout.name!r} does not hold")
            continue
        stored = _promised(weight, fmt, folder, layout)
        if stored is None:
            name = layout.stored(weight, fmt, (128, 128))[0].name
            report.problems.append(f"{name}: listed as {fmt} and missing")
            continue
        owned.update(s.name for s in stored)
        faults = [fault for s in stored if (fault := _differs(s, folder.tensors.get(s.name)))]
        report.problems.extend(faults)
        if not faults:
            known[weight] = stored
    for name, header in folder.tensors.items():
        if name not in owned and _looks_quantized(name, header):
            report.problems.append(
                f"{name}: stored as {_dtype(header.dtype)}, which is quantized, and the config does not list it as such"
            )
    report.problems += incomplete_experts(described.config, folder.tensors)
    return known


def _promised(weight: str, fmt: str, folder: Folder, layout: Layout) -> list[Stored] | None:
    form = formats.get(fmt)
    codes = folder.tensors.get(layout.stored(weight, fmt, (128, 128))[0].name)
    if codes is None or len(codes.shape) != 2:
        return None
    matrix = (codes.shape[0], codes.shape[1] * _PER_ELEMENT.get(codes.dtype, 1))
    if matrix[1] % form.block and not form.partial_blocks:
        return None
    return layout.stored(weight, fmt, matrix)


def _differs(promised: Stored, header: TensorHeader | None) -> str | None:
    if header is None:
        return f"{promised.name}: missing"
    e8m0 = (
        promised.dtype == torch.uint8 and header.dtype == torch.float8_e8m0fnu
    )  # the same bytes under their newer name
    if (header.dtype != promised.dtype and not e8m0) or header.shape != promised.shape:
        return (
            f"{promised.name}: stored as {_dtype(header.dtype)} {list(header.shape)}, the config promises "
            f"{_dtype(promised.dtype)} {list(promised.shape)}"
        )
    return None


def _looks_quantized(name: str, header: TensorHeader) -> bool:
    low = header.dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
    return (low and len(header.shape) >= 2) or name.endswith(
        (
            ".weight_scale",
            ".weight_scale_2",
            ".weight_global_scale",
            ".weight_scale_inv",
            ".weight_packed",
            ".weight_shape",
        )
    )


def _hashes(folder: Folder, report: Verification, progress: bool) -> None:
    try:
        record = read_record(folder.path)
    except SwapqError as error:
        report.problems.append(str(error))
        return
    if record is None:
        report.notes.append(f"no {RECORD_NAME}: shard hashes cannot be checked")
        return
    shards: dict[str, Any] = record["shards"]
    for name in sorted(set(folder.files) - set(shards)):
        report.problems.append(f"{name}: is not among the shards that {RECORD_NAME} records")
    for name, said in track(sorted(shards.items()), "Hashing", transient=True, disable=not progress, console=_stderr()):
        path = folder.path / name
        if not path.is_file():
            report.problems.append(f"{name}: recorded in {RECORD_NAME} and missing")
        elif path.stat().st_size != said.get("bytes"):
            report.problems.append(f"{name}: {path.stat().st_size} bytes, {RECORD_NAME} records {said.get('bytes')}")
        elif sha256_of(path) != said.get("sha256"):
            report.problems.append(f"{name}: its SHA-256 is not the one that {RECORD_NAME} records; the file changed")
    report.problems += record_faults(record, folder.path)


def _copies(folder: Folder, origin: Folder, report: Verification) -> None:
    """A note for each copied file that differs from the source's: it may have been edited on purpose. The card replaces README.md."""
    for name in copied_files(folder.path):
        ours, theirs = folder.path / name, origin.path / name
        if name == "README.md" or not ours.is_file():
            continue
        if not theirs.is_file():
            report.notes.append(f"{name}: was copied from a source, and this source has no such file")
        elif not filecmp.cmp(ours, theirs, shallow=False):
            report.notes.append(f"{name}: differs from the source's, from which it was copied")


def _values(
    folder: Folder,
    described: Described,
    layout: Layout,
    known: dict[str, list[Stored]],
    files: SourceFiles,
    report: Verification,
    progress: bool,
) -> None:
    """FP8 codes that are numbers, finite block scales not below zero, FP32 scales above zero, equal scales in gate/up pairs."""
    pairs: dict[str, dict[str, float]] = {}
    for weight, stored in track(
        known.items(), "Reading scales", transient=True, disable=not progress, console=_stderr()
    ):
        fmt = described.quantized[weight]
        report.tensors[weight] = {"role": role_of(weight).value, "format": fmt}
        if stored[0].dtype == torch.float8_e4m3fn and (
            fault := _code_fault(stored[0].name, _read(folder.tensors[stored[0].name], files))
        ):
            report.problems.append(fault)
        tensors = {s.name: _read(folder.tensors[s.name], files) for s in stored[1:]}
        for name, tensor in tensors.items():
            fault = _scale_fault(name, tensor)
            if fault:
                report.problems.append(fault)
        pair = _pair_key(weight)
        number = next(
            (
                float(t.flatten()[0])
                for n, t in tensors.items()
                if n.endswith(("weight_scale_2", "weight_global_scale"))
            ),
            None,
        )
        if pair and number is not None:
            pairs.setdefault(pair, {})[weight] = number
    for names in pairs.values():
        if len(set(names.values())) > 1:
            (a, x), (b, y) = list(names.items())[:2]
            report.problems.append(
                f"{a} and {b}: FP32 scales {x:g} and {y:g} differ; engines keep one for gate and up, halving or doubling the other"
            )


def _read(header: TensorHeader, files: SourceFiles) -> Tensor:
    return files.tensor(header.file, header.start, header.dtype, header.shape, header.name)


def _code_fault(name: str, codes: Tensor) -> str | None:
    bad = int(((codes.view(torch.uint8) & 0x7F) == 0x7F).sum())
    return f"{name}: {bad} of {codes.numel()} codes are NaN" if bad else None


def _scale_fault(name: str, tensor: Tensor) -> str | None:
    if tensor.dtype == torch.uint8 or tensor.dtype == torch.float8_e8m0fnu:
        bad = int((tensor.view(torch.uint8) == 255).sum())
        return f"{name}: {bad} scales are NaN (E8M0 byte 255)" if bad else None
    if name.endswith(".weight_shape"):
        return None
    values = tensor.float()
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        return f"{name}: {bad} of {values.numel()} scales are not finite"
    if tensor.dtype == torch.float8_e4m3fn and bool((low := tensor.view(torch.uint8) >= 0x80).any()):
        return f"{name}: {int(low.sum())} of {values.numel()} block scales are below zero, which no quantizer writes"
    if tensor.dtype in (torch.float32, torch.bfloat16) and bool((values <= 0).any()):
        kind = "FP32" if tensor.dtype == torch.float32 else "BF16"
        return f"{name}: the {kind} scale is {values[values <= 0][0].item():g}; a scale is above zero"
    return None


def _pair_key(weight: str) -> str | None:
    head, _, leaf = weight.removesuffix(".weight").rpartition(".")
    return head if leaf in ("gate_proj", "up_proj", "w1", "w3") and ".experts." in f".{head}." else None


def _totals(folder: Folder, described: Described, layout: Layout, report: Verification) -> None:
    owned = set(described.quantized)
    parameters = 0
    for name, header in folder.tensors.items():
        codes = name if name in owned else name.removesuffix("_packed")
        if codes in owned:
            parameters += math.prod(header.shape) * _PER_ELEMENT.get(header.dtype, 1)
        elif not _looks_quantized(name, header) and not name.endswith(_BESIDE):
            parameters += math.prod(header.shape)
    report.totals |= {
        "layout": described.layout,
        "bytes": folder.nbytes,
        "parameters": parameters,
        "bits_per_parameter": round(8 * folder.nbytes / parameters, 4) if parameters else 0.0,
        "tensors": len(folder.tensors),
        "quantized_weights": len(described.quantized),
    }


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stderr() -> Console:
    return Console(stderr=True)
