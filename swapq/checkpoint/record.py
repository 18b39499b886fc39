"""What a destination says of its conversion: progress while it runs, and ``swapq.json`` when it is complete."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from swapq._version import __version__
from swapq.checkpoint.job import CONVERSION_VERSION, Job
from swapq.checkpoint.units import Expand
from swapq.checkpoint.writer import write_json
from swapq.errors import CheckpointError
from swapq.headers import INDEX_NAME, SCRATCH_NAME, SHARD_NAME, read_json
from swapq.recipe import Recipe

__all__ = [
    "EXPORT",
    "LOCK_NAME",
    "PROGRESS_NAME",
    "RECORD_NAME",
    "SCRATCH_NAME",
    "Progress",
    "completion",
    "copied_files",
    "exported",
    "read_record",
    "record_faults",
    "sha256_of",
    "strangers",
]

#: written last, in the destination
RECORD_NAME = "swapq.json"
#: in the scratch folder
PROGRESS_NAME = "progress.json"
#: beside it, held by a conversion that runs; an export has none
LOCK_NAME = "lock"
#: fingerprint of what no job made
EXPORT = "export of a live model"
_HASH_BUFFER = 1 << 22
#: JSON files that say what the shards mean: hashed like them
_CONFIGS = ("config.json", "hf_quant_config.json", INDEX_NAME)
#: key of the record's own hash
_SEAL = "record_sha256"


@dataclass
class Progress:
    """Shards that an unfinished conversion has published, with what the record will say of each; and by which files of the folder, a kill
    at any moment later, it is known that swapq wrote them.

    Attributes:
        path: the file.
        fingerprint: of the job, or ``EXPORT``.
        source_mtime_ns: newest modification time of a source shard when the conversion began.
        shards: shard -> bytes, SHA-256 and underflowed blocks.
        layout: of what is written.
        planned: shard that will be there -> bytes.
        replaces: shard of an earlier conversion or export -> bytes, while these are being removed.
        copied: files that the earlier conversion copied, while these are being removed.
    """

    path: Path
    fingerprint: str
    source_mtime_ns: int
    shards: dict[str, dict[str, Any]] = field(default_factory=dict)
    layout: str = ""
    planned: dict[str, int] = field(default_factory=dict)
    replaces: dict[str, int] = field(default_factory=dict)
    copied: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, scratch: Path, fingerprint: str) -> "Progress | None":
        """The progress of an earlier run of the same conversion; None if there is none.

        Raises:
            CheckpointError: the folder holds another conversion, unfinished, or a file of that name that is no progress.
        """
        found = cls.read(scratch)
        if found is not None and found.fingerprint != fingerprint:
            raise CheckpointError(
                f"{scratch.parent}: holds an unfinished conversion of another source, recipe, layout or shard size, or an unfinished "
                "export; finish it with its own command, choose another destination, or pass --overwrite"
            )
        return found

    @classmethod
    def read(cls, scratch: Path) -> "Progress | None":
        """The progress of whatever is unfinished; None if nothing is, or it was stopped before its first note.

        Raises:
            CheckpointError: a file of that name that is no progress.
        """
        path = scratch / PROGRESS_NAME
        if not path.exists():
            return None
        try:
            content = read_json(path)
        except CheckpointError:
            content = {}
        fingerprint, shards, mtime = (content.get(key) for key in ("fingerprint", "shards", "source_mtime_ns"))
        layout, copied = content.get("layout", ""), content.get("copied", [])
        planned, replaces = content.get("planned", {}), content.get("replaces", {})
        tables = _is_shard_table(shards) and _is_size_table(planned) and _is_size_table(replaces)
        if not (tables and isinstance(fingerprint, str) and isinstance(layout, str) and isinstance(mtime, int)):
            raise CheckpointError(
                f"{path}: is no progress of a conversion, and without it nothing says which shards it wrote; remove {scratch.parent} or "
                "choose another destination"
            )
        return cls(path, fingerprint, mtime, shards or {}, layout, planned, replaces, _inside(scratch.parent, copied))

    @classmethod
    def start(cls, scratch: Path, job: Job) -> "Progress":
        """The first note of a job, which says too what the folder holds of an earlier one: it is removed next."""
        return cls._start(
            scratch,
            fingerprint=job.fingerprint,
            source_mtime_ns=job.source_mtime_ns(),
            layout=job.layout.name,
            planned={shard.file: shard.nbytes for shard in job.shards},
        )

    @classmethod
    def start_export(cls, folder: Path, layout: str, planned: Mapping[str, int]) -> "Progress":
        """The note of an export whose shards are written under other names, before the first file is replaced."""
        return cls._start(
            folder / SCRATCH_NAME, fingerprint=EXPORT, source_mtime_ns=0, layout=layout, planned=dict(planned)
        )

    @classmethod
    def _start(cls, scratch: Path, **said: Any) -> "Progress":
        folder = scratch.parent
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            earlier = cls.read(scratch)
        except CheckpointError:
            earlier = None
        held = {path.name: path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file()}
        fresh = cls(
            scratch / PROGRESS_NAME,
            **said,
            replaces={name: size for name, size in held.items() if SHARD_NAME.fullmatch(name)},
            copied=[*copied_files(folder), *(earlier.copied if earlier else ())],
        )
        fresh.save()
        return fresh

    def save(self) -> None:
        """Write the progress, whole or not at all."""
        write_json(
            self.path,
            {key: value for key, value in vars(self).items() if key != "path"},
        )

    def wrote(self, path: Path) -> bool:
        """Whether a file has the name and the size of a shard that was written, is to be written, or was there when this began."""
        size = path.stat().st_size if path.is_file() else -1
        return size in (
            self.shards.get(path.name, {}).get("bytes"),
            self.planned.get(path.name),
            self.replaces.get(path.name),
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


def strangers(folder: Path, others: Iterable[str] = ()) -> list[str]:
    """Files in ``folder`` that a conversion or an export would remove or replace, and that none wrote: configs, shards and ``others``.

    What is ours is proved, not guessed. Where something is unfinished, ours are the shards of the sizes that its progress lists. Where it
    is not, all is ours if the config says so, or the record does and config or shards agree with it; masters that were saved into an
    export are not, though its record is still there. Beside weights of ours, tokenizers and cards that came later may be replaced.
    """
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    method = _method(folder)
    if not os.path.lexists(folder / RECORD_NAME):
        try:
            progress = Progress.read(folder / SCRATCH_NAME)
        except CheckpointError:
            progress = None
        if progress is not None:
            config = os.path.lexists(folder / "config.json") and method not in ("swapq", progress.layout)
            return ["config.json"] * config + [name for name in shards if not progress.wrote(folder / name)]
    if _is_ours(folder, method):
        return [name for name in shards if not SHARD_NAME.fullmatch(name)]
    fixed = ("config.json", INDEX_NAME, "hf_quant_config.json")
    return [name for name in (*fixed, *shards, *others, RECORD_NAME) if os.path.lexists(folder / name)]


def _is_ours(folder: Path, method: str | None) -> bool:
    """Whether the finished checkpoint in ``folder``, or one of which only the config was removed, is swapq's."""
    try:
        record = read_record(folder)
    except CheckpointError:
        record = None
    if record is None or method == "swapq":
        return method == "swapq"
    if method == record.get("layout"):
        return True
    sizes = {name: said.get("bytes") for name, said in record["shards"].items()}
    if method is None:  # shards are removed after the config, and only then
        sizes = {path.name: sizes.get(path.name) for path in folder.glob("*.safetensors")}
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())


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
    return _inside(folder, listed)


def _inside(folder: Path, listed: object) -> list[str]:
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
        for path in sorted(folder.glob("*.safetensors"))
        if SHARD_NAME.fullmatch(path.name)
    }
    return _sealed(
        {
            "swapq": __version__,
            "conversion": CONVERSION_VERSION,
            "fingerprint": EXPORT,
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


def _is_size_table(sizes: object) -> TypeGuard[dict[str, int]]:
    return isinstance(sizes, dict) and all(type(size) is int for size in sizes.values())


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
