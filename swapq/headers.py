"""What a checkpoint folder says it holds, read from safetensors headers and the index alone.

A folder is untrusted input: names taken from the index are plain file names inside the folder, every length and offset is
checked against the file, index and headers must agree, and no tensor byte is read. A shard may be a symbolic link, since the
Hub's cache is made of them. A file of the right length may still hold the wrong bytes: that is ``verify``'s business.
"""

import json
import math
import os
import re
import stat
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swapq.errors import CheckpointError

__all__ = [
    "DTYPES",
    "INDEX_NAME",
    "SCRATCH_NAME",
    "SHARD_NAME",
    "SINGLE_NAME",
    "Folder",
    "TensorHeader",
    "folder_path",
    "read_folder",
    "read_json",
    "read_shard",
    "require_text",
    "shown",
]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
#: shards as swapq names them; whatever else ends in .safetensors is not ours to remove
SHARD_NAME = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")
#: folder inside the destination of a conversion for what is not whole; removed at its end. An export has one while it replaces files
SCRATCH_NAME = ".swapq"
#: the safetensors library's own limit
MAX_HEADER_BYTES = 100_000_000
MAX_JSON_BYTES = 1_000_000_000

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
#: names that are the weights of pickled checkpoints: never read
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One line of a safetensors header. ``start`` and ``end`` are positions in the file, not in its data part."""

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Folder:
    """The tensors of one checkpoint folder by name, and its safetensors files in name order."""

    path: Path
    files: tuple[str, ...]
    tensors: Mapping[str, TensorHeader]
    index_metadata: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Stored bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())


def require_text(folder: Path, name: str) -> None:
    """Refuse a file name that is not UTF-8: no record could name the file, and it cannot be printed.

    Raises:
        CheckpointError: with the bytes of the name.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{folder}: holds a file named {os.fsencode(name)!r}, which is not UTF-8; rename it"
        ) from None


def shown(name: str) -> str:
    """A file name as text that can be printed, whatever its bytes are."""
    return os.fsencode(name).decode(errors="backslashreplace")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object with unique keys.

    Raises:
        CheckpointError: the file is missing, too large, not UTF-8, not JSON, not an object, or names a key twice.
    """
    try:
        _require_file(path)
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes are too many for a JSON file of a checkpoint")
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    return _object(text, str(path))


def _require_file(path: Path) -> None:
    """A pipe or a device would be waited for, or read without an end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder says so itself when it is opened
        raise CheckpointError(f"{path}: cannot be read (neither a file nor a link to one)")


def read_shard(path: Path) -> dict[str, TensorHeader]:
    """The header of one safetensors file, in the order of the data.

    Raises:
        CheckpointError: the file is no whole safetensors file: too short, header too large or not JSON, an unknown dtype, a
            shape that disagrees with its span, a hole, an overlap, or a data part of another length than the header promises.
    """
    where = path.name
    try:
        _require_file(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            if len(first) < 8:
                raise CheckpointError(f"{where}: {size} bytes are too few for a safetensors file; download it again")
            (length,) = struct.unpack("<Q", first)
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{where}: claims a header of {length} bytes, the limit is {MAX_HEADER_BYTES}: not a safetensors file"
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{where}: ends inside its header ({size} of {8 + length} bytes); download it again"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    table = _object(raw, f"header of {where}")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__ must map strings to strings")
    tensors = [_tensor(name, entry, where, 8 + length) for name, entry in table.items()]
    tensors.sort(key=lambda t: (t.start, t.end))
    position = 8 + length
    for tensor in tensors:
        if tensor.start != position:
            kind = "overlaps the one before it" if tensor.start < position else "leaves a hole before it"
            raise CheckpointError(
                f"{where}: tensor {tensor.name} {kind} (starts at {tensor.start}, expected {position})"
            )
        position = tensor.end
    if position != size:
        what = "is cut short" if position > size else "has bytes that no tensor owns"
        raise CheckpointError(f"{where}: {what}: {size} bytes, its header promises {position}; download it again")
    return {t.name: t for t in tensors}


def folder_path(directory: str | os.PathLike[str]) -> Path:
    """The folder as a path.

    Raises:
        CheckpointError: it is not a folder; for what looks like a name on the Hub, with the command that downloads it.
    """
    path = Path(directory)
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path}: is a file; give the folder that holds config.json and the safetensors files")
    hub = not path.is_absolute() and len(path.parts) == 2 and not path.parent.exists()
    advice = f"; if it is a name on the Hub, download it first: hf download {path} --local-dir FOLDER" if hub else ""
    raise CheckpointError(f"{path}: no such folder{advice}")


def read_folder(directory: str | os.PathLike[str]) -> Folder:
    """Headers and index of a Hugging Face checkpoint folder.

    Raises:
        CheckpointError: no folder, an unfinished conversion or export, no safetensors, only pickled weights, shards without an index, an
            index beside ``model.safetensors``, an index that points outside the folder, or an index and headers that disagree (a missing
            file, a listed tensor that is not there, a tensor that is there and not listed, a tensor in two files).
    """
    path = folder_path(directory)
    if (path / SCRATCH_NAME).is_dir() and not (path / "config.json").exists():
        raise CheckpointError(
            f"{path}: is an unfinished conversion or export ({SCRATCH_NAME} is there and config.json is not yet); run its command again, "
            "which goes on where it stopped"
        )
    present = sorted(entry.name for entry in path.iterdir() if entry.name.endswith(".safetensors"))
    has_index = (path / INDEX_NAME).exists()
    if has_index and SINGLE_NAME in present:
        raise CheckpointError(
            f"{path}: holds both {SINGLE_NAME} and {INDEX_NAME}, and readers disagree on which counts; {_stale(path)}"
        )
    if has_index:
        return _indexed(path)
    if not present:
        pickles = sorted(entry.name for entry in path.iterdir() if entry.name.endswith(_PICKLES))
        if pickles:
            raise CheckpointError(
                f"{path}: holds {pickles[0]} and no safetensors; pickles are not read: save the model as safetensors first"
            )
        raise CheckpointError(f"{path}: holds no safetensors file")
    single = SINGLE_NAME if SINGLE_NAME in present else present[0]  # as transformers reads it, whatever lies beside
    if len(present) > 1 and single != SINGLE_NAME:
        raise CheckpointError(
            f"{path}: {len(present)} safetensors files and no {INDEX_NAME}: nothing says that they are all; download the index"
        )
    require_text(path, single)
    return Folder(path, (single,), read_shard(path / single), {})


def _stale(path: Path) -> str:
    """Which of index and single file to remove: the index, unless all its shards are there."""
    try:
        weight_map = read_json(path / INDEX_NAME).get("weight_map")
    except CheckpointError:
        weight_map = None
    files = {f for f in weight_map.values() if isinstance(f, str)} if isinstance(weight_map, dict) else set()
    for name in sorted(files):
        _check_file_name("a tensor", name)
    missing = sorted(name for name in files if not (path / name).is_file())
    if missing:
        return f"the index names {_some(missing)}, not in the folder: remove {INDEX_NAME}"
    if not files - {SINGLE_NAME}:
        return f"the index names no other file: remove {INDEX_NAME}"
    return f"the shards of the index are all there: remove {SINGLE_NAME} to keep them, or else {INDEX_NAME} and them"


def _indexed(path: Path) -> Folder:
    index = read_json(path / INDEX_NAME)
    weight_map, metadata = index.get("weight_map"), index.get("metadata") or {}
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX_NAME}: has no weight_map of tensor names to files")
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{INDEX_NAME}: metadata is {type(metadata).__name__}, expected an object")
    for name, file in weight_map.items():
        _check_file_name(name, file)
    files = tuple(sorted(set(weight_map.values())))
    missing = [file for file in files if not (path / file).is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: the index names {_some(missing)}, not in the folder; download the missing files"
        )
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        for name, tensor in read_shard(path / file).items():
            if name in tensors:
                raise CheckpointError(f"tensor {name} is in {tensors[name].file} and in {file}")
            tensors[name] = tensor
    absent = [name for name in weight_map if name not in tensors]
    if absent:
        raise CheckpointError(f"{INDEX_NAME} lists {_some(absent)}, which no shard holds")
    unlisted = [name for name in tensors if name not in weight_map]
    if unlisted:
        raise CheckpointError(f"{tensors[unlisted[0]].file} holds {_some(unlisted)}, which {INDEX_NAME} does not list")
    moved = [name for name, file in weight_map.items() if tensors[name].file != file]
    if moved:
        raise CheckpointError(
            f"{INDEX_NAME} places {moved[0]} in {weight_map[moved[0]]}, it is in {tensors[moved[0]].file}"
        )
    return Folder(path, files, tensors, metadata)


def _check_file_name(name: str, file: object) -> None:
    if not isinstance(file, str):
        raise CheckpointError(f"{INDEX_NAME}: file of {name} is {file!r}, expected a file name")
    plain = file == os.path.basename(file) and not any(c in file for c in "/\\:\0") and file not in ("", ".", "..")
    if not plain or not file.isprintable():
        raise CheckpointError(
            f"{INDEX_NAME}: file of {name} is {file!r}; only plain file names inside the folder are followed"
        )
    if not file.endswith(".safetensors"):
        raise CheckpointError(f"{INDEX_NAME}: file of {name} is {file!r}; only .safetensors files are read")


def _tensor(name: str, entry: object, where: str, base: int) -> TensorHeader:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: entry of {name} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: dtype of {name} is {dtype!r}, not one that swapq reads")
    if not (isinstance(shape, list) and len(shape) <= 64 and all(_is_count(n) for n in shape)):
        raise CheckpointError(f"{where}: shape of {name} is {shape!r}")
    if not (
        isinstance(offsets, list)
        and len(offsets) == 2
        and all(_is_count(n) for n in offsets)
        and offsets[0] <= offsets[1]
    ):
        raise CheckpointError(f"{where}: data_offsets of {name} are {offsets!r}")
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != expected:
        raise CheckpointError(
            f"{where}: {name} is {dtype} {shape}, {expected} bytes, its data_offsets span {offsets[1] - offsets[0]}"
        )
    return TensorHeader(name, where, DTYPES[dtype], tuple(shape), base + offsets[0], base + offsets[1])


def _is_count(n: object) -> bool:
    return type(n) is int and 0 <= n < 1 << 63


def _object(text: bytes, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{where}: key {twice!r} appears twice")
        return table

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: holds {type(value).__name__}, expected a JSON object")
    if b"\\ud" in text.lower():  # an escaped surrogate: half a pair is no text, and no other reader takes it
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise CheckpointError(f"{where}: not readable as JSON ({error.reason}); download it again") from None
    return value


def _some(names: list[str], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
