"""What a destination says of its conversion: progress while it runs, and ``swapq.json`` when it is complete."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from swapq._version import __version__
from swapq.checkpoint.job import CONVERSION_VERSION, Job
from swapq.checkpoint.units import Expand
from swapq.checkpoint.writer import write_json
from swapq.errors import CheckpointError
from swapq.headers import INDEX_NAME, SCRATCH_NAME, read_json
from swapq.recipe import Recipe

__all__ = [
    "PROGRESS_NAME",
    "RECORD_NAME",
    "SCRATCH_NAME",
    "Progress",
    "completion",
    "copied_files",
    "exported",
    "is_ours",
    "read_record",
    "record_faults",
    "sha256_of",
]

#: written last, in the destination
RECORD_NAME = "swapq.json"
#: in the scratch folder
PROGRESS_NAME = "progress.json"
_HASH_BUFFER = 1 << 22
#: JSON files that say what the shards mean: hashed like them
_CONFIGS = ("config.json", "hf_quant_config.json", INDEX_NAME)
#: key of the record's own hash
_SEAL = "record_sha256"


@dataclass
class Progress:
    """Shards that an unfinished conversion has published, with what the record will say of each.

    Attributes:
        path: the file.
        fingerprint: of the job.
        source_mtime_ns: newest modification time of a source shard when the conversion began.
        shards: shard -> bytes, SHA-256 and underflowed blocks.
    """

    path: Path
    fingerprint: str
    source_mtime_ns: int
    shards: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, scratch: Path, fingerprint: str) -> "Progress | None":
        """The progress of an earlier run of the same conversion; None if there is none.

        Raises:
            CheckpointError: the folder holds another conversion, unfinished, or a file of that name that is no progress.
        """
        path = scratch / PROGRESS_NAME
        if not path.exists():
            return None
        content = read_json(path)
        if content.get("fingerprint") != fingerprint:
            raise CheckpointError(
                f"{scratch.parent}: holds an unfinished conversion of another source, recipe, layout or shard size; finish it with "
                "its own command, choose another destination, or pass --overwrite"
            )
        shards, mtime = content.get("shards"), content.get("source_mtime_ns")
        if not _is_shard_table(shards) or type(mtime) is not int:
            raise CheckpointError(f"{path}: is no progress of a conversion; pass --overwrite to start again")
        return cls(path, fingerprint, mtime, shards)

    @classmethod
    def start(cls, scratch: Path, job: Job) -> "Progress":
        scratch.mkdir(parents=True, exist_ok=True)
        fresh = cls(scratch / PROGRESS_NAME, job.fingerprint, job.source_mtime_ns())
        fresh.save()
        return fresh

    def save(self) -> None:
        """Write the progress, whole or not at all."""
        write_json(
            self.path,
            {"fingerprint": self.fingerprint, "source_mtime_ns": self.source_mtime_ns, "shards": self.shards},
        )

    def finished(self, folder: Path) -> set[str]:
        """Shards that are there with the size that was recorded."""
        return {
            name
            for name, said in self.shards.items()
            if (folder / name).is_file() and (folder / name).stat().st_size == said.get("bytes")
        }


def read_record(folder: Path) -> dict[str, Any] | None:
    """The completion record, or None if the folder has none.

    Raises:
        CheckpointError: a file of that name that is no record.
    """
    path = folder / RECORD_NAME
    if not path.exists():
        return None
    record = read_json(path)
    if not isinstance(record.get("fingerprint"), str) or not _is_shard_table(record.get("shards")):
        raise CheckpointError(f"{path}: is no completion record of swapq; remove it or choose another destination")
    return record


def is_ours(folder: Path) -> bool:
    """Whether the checkpoint in ``folder`` is swapq's: its scratch folder is there, the config says so, or the record does and config or
    shards agree with it. Masters that were saved into an export are not, though its record is still there."""
    if (folder / SCRATCH_NAME).is_dir():
        return True
    method = _method(folder)
    try:
        record = read_record(folder)
    except CheckpointError:
        record = None
    if record is None or method == "swapq":
        return method == "swapq"
    sizes = ((folder / name, said.get("bytes")) for name, said in record["shards"].items())
    return method in (None, record.get("layout")) or all(p.is_file() and p.stat().st_size == n for p, n in sizes)


def _method(folder: Path) -> str | None:
    """``quant_method`` of the config, empty where it has none; None where there is no readable config."""
    try:
        entry = read_json(folder / "config.json").get("quantization_config")
    except CheckpointError:
        return None
    return str(entry.get("quant_method") or "") if isinstance(entry, dict) else ""


def copied_files(folder: Path) -> list[str]:
    """Files in ``folder`` that its conversion copied from the source, by its record; what leads out of the folder is not among them."""
    try:
        listed = (read_record(folder) or {}).get("files")
    except CheckpointError:
        return []
    names = [Path(name) for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    inside = [p for p in names if not p.is_absolute() and ".." not in p.parts and (folder / p).is_file()]
    return [str(p) for p in inside if (folder / p).parent.resolve().is_relative_to(folder.resolve())]


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_BUFFER):
            digest.update(chunk)
    return digest.hexdigest()


def exported(recipe: Recipe, layout: str, folder: Path) -> dict[str, Any]:
    """The completion record of an export, whose configs are written: hashes, and the recipe, which the configs of other tools have no
    place for."""
    shards = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.glob("model*.safetensors"))
    }
    return _sealed(
        {
            "swapq": __version__,
            "conversion": CONVERSION_VERSION,
            "fingerprint": "export of a live model",
            "recipe": recipe.to_dict(),
            "layout": layout,
            "shards": shards,
            "configs": _configs(folder),
        }
    )


def record_faults(record: Mapping[str, Any], folder: Path) -> list[str]:
    """What differs from the record beside the shards, one sentence each: configs, copied files that are gone, the record itself.

    Records of earlier versions, which hash the shards alone, are believed.
    """
    found = []
    if {_SEAL, "configs"} & record.keys() and record.get(_SEAL) != _seal(record):
        found.append(f"{RECORD_NAME}: is not what was written when the folder was finished; the file changed")
    configs, files = record.get("configs"), record.get("files")
    for name, said in sorted(configs.items()) if isinstance(configs, dict) else ():
        if name not in _CONFIGS:
            found.append(f"{RECORD_NAME}: names {name!r} among the configs, which is none")
        elif not (folder / name).is_file():
            found.append(f"{name}: recorded in {RECORD_NAME} and missing")
        elif sha256_of(folder / name) != said:
            found.append(f"{name}: its SHA-256 is not the one that {RECORD_NAME} records; the file changed")
    for name in files if isinstance(files, list) else ():
        if isinstance(name, str) and not os.path.lexists(folder / name):
            found.append(f"{name}: copied from the source by {RECORD_NAME} and missing")
    return found


def _configs(folder: Path) -> dict[str, str]:
    return {name: sha256_of(folder / name) for name in _CONFIGS if (folder / name).is_file()}


def _sealed(record: dict[str, Any]) -> dict[str, Any]:
    return record | {_SEAL: _seal(record)}


def _seal(record: Mapping[str, Any]) -> str:
    content = {key: value for key, value in record.items() if key != _SEAL}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _is_shard_table(shards: object) -> TypeGuard[dict[str, dict[str, Any]]]:
    """Plain file names, each with an object: what the names lead to is looked at."""
    return isinstance(shards, dict) and all(
        isinstance(said, dict) and name not in ("", ".", "..") and not any(c in name for c in "/\\\0")
        for name, said in shards.items()
    )


def completion(job: Job, state: Progress, others: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """The completion record of a job whose shards are all published in ``folder``, whose ``others`` are copied and whose configs are
    written."""
    shards: Mapping[str, Mapping[str, Any]] = state.shards
    record = {
        "swapq": __version__,
        "conversion": CONVERSION_VERSION,
        "fingerprint": job.fingerprint,
        "recipe": job.plan.recipe.to_dict(),
        "layout": job.layout.name,
        "max_shard_size": job.max_shard_size,
        "source": {
            "headers_sha256": job.source_hashes,
            "bytes": job.source.nbytes,
            "dequantized": sum(isinstance(unit, Expand) for shard in job.shards for unit in shard.units),
            "mtime_ns": state.source_mtime_ns,
        },
        "shards": {name: dict(shards[name]) for name in sorted(shards)},
        "configs": _configs(folder),
        "files": list(others),
        "underflowed_blocks": sum(int(said.get("underflowed_blocks", 0)) for said in shards.values()),
    }
    return _sealed(record)
