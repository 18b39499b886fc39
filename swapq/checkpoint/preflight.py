"""Every check of a conversion that can fail before its first byte: folders, space, permissions, an earlier run."""

import os
import shutil
from pathlib import Path
from typing import Any

from swapq.checkpoint import layouts
from swapq.checkpoint.described import incomplete_experts
from swapq.checkpoint.job import Job
from swapq.checkpoint.others import Others
from swapq.checkpoint.record import RECORD_NAME, SCRATCH_NAME, Progress, read_record, record_faults, strangers
from swapq.checkpoint.units import units_of
from swapq.errors import CheckpointError, SwapqError
from swapq.headers import read_folder, read_json
from swapq.plan import Plan

__all__ = ["check_folders", "check_space", "is_complete", "refusal", "resumable", "unsound"]

#: room for configs, the index and the file system's own needs
_MARGIN = 64 << 20


def check_folders(source: Path, destination: Path) -> None:
    """Source and destination are disjoint, and the destination can be a folder that we write to.

    Raises:
        CheckpointError: they overlap, the destination is a file, or it cannot be written.
    """
    src, dst = source.resolve(), destination.resolve()
    if src == dst or src in dst.parents or dst in src.parents:
        raise CheckpointError(
            f"{destination}: source and destination overlap; the source is never modified, choose another folder"
        )
    if destination.exists() and not destination.is_dir():
        raise CheckpointError(f"{destination}: is a file; name a folder")
    scratch = destination / SCRATCH_NAME
    if scratch.is_symlink() or (scratch.exists() and not scratch.is_dir()):
        raise CheckpointError(
            f"{scratch}: is not the scratch folder of a conversion; remove it or choose another folder"
        )
    nearest = dst
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        raise CheckpointError(f"{destination}: {nearest} is a file; name a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{nearest}: cannot be written by this user; change its mode or choose another destination"
        )
    files = [source / name for name in os.listdir(source) if name.endswith(".safetensors")]
    if destination.is_dir():
        mine = {(s.st_dev, s.st_ino) for s in (p.stat() for p in files if p.exists())}
        for path in destination.glob("*.safetensors"):
            if path.exists() and (path.stat().st_dev, path.stat().st_ino) in mine:
                raise CheckpointError(
                    f"{path}: is the same file as one of the source's; the source is never modified, choose another folder"
                )


def refusal(the_plan: Plan, source: Path) -> str:
    """Why a conversion to layout ``swapq`` would be refused although the plan was not, by headers and names alone; or empty, also where the
    plan's own warnings say it."""
    if any(layout.unreadable for layout in the_plan.anatomy.experts):
        return ""
    try:
        folder = read_folder(source)
        units_of(the_plan, folder, layouts.get("swapq"))
        Others.of(source, folder.files)
    except SwapqError as error:
        return str(error)
    return ""


def unsound(source: Path) -> str:
    """What ``verify`` would say against a conversion of this source, whose tensors are copied as they are; or empty."""
    try:
        folder = read_folder(source)
        return next(iter(incomplete_experts(read_json(folder.path / "config.json"), folder.tensors)), "")
    except SwapqError:
        return ""


def check_space(job: Job, others: Others, destination: Path, done: set[str]) -> None:
    """Room for what is still to be written.

    Raises:
        CheckpointError: with the bytes needed and free.
    """
    needed = sum(shard.nbytes for shard in job.shards if shard.file not in done) + others.nbytes + _MARGIN
    nearest = destination.resolve()
    while not nearest.exists():
        nearest = nearest.parent
    free = shutil.disk_usage(nearest).free
    if free < needed:
        raise CheckpointError(
            f"{destination}: {needed / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free; make room or choose another disk"
        )


def is_complete(job: Job, destination: Path) -> bool:
    """Whether the destination holds this very conversion, finished.

    Raises:
        CheckpointError: it holds another one, or one whose source or shards changed since.
    """
    record = read_record(destination) if destination.is_dir() else None
    if record is None:
        return False
    if record["fingerprint"] != job.fingerprint:
        raise CheckpointError(
            f"{destination}: holds a finished conversion of another source, recipe, layout or shard size; choose another destination "
            "or pass --overwrite"
        )
    for name, said in record["shards"].items():
        path = destination / name
        if not path.is_file() or path.stat().st_size != said.get("bytes"):
            raise CheckpointError(
                f"{path}: is not the shard that {RECORD_NAME} records; pass --overwrite to make it again"
            )
    if faults := record_faults(record, destination):
        raise CheckpointError(f"{destination}: {faults[0]}; pass --overwrite to make it again")
    if job.source_mtime_ns() > _recorded_mtime(record):
        raise CheckpointError(
            f"{destination}: the source was modified after it was converted; pass --overwrite to convert it again"
        )
    return True


def _recorded_mtime(record: dict[str, Any]) -> int:
    source = record.get("source")
    mtime = source.get("mtime_ns") if isinstance(source, dict) else None
    return mtime if type(mtime) is int else 0


def resumable(job: Job, others: Others, destination: Path, *, overwrite: bool, resume: bool) -> Progress | None:
    """Progress of an interrupted run of the same conversion, None to start afresh.

    With ``overwrite``, an unfinished run of the same conversion is gone on with too, so that the same command finishes its own work;
    whatever else swapq wrote there is replaced.

    Raises:
        CheckpointError: the folder is not empty and holds no such run, or a file is in the way that swapq did not write.
    """
    scratch = destination / SCRATCH_NAME
    if not destination.is_dir():
        return None
    foreign = strangers(destination, others.names)
    if overwrite:
        if foreign:
            Progress.read(scratch)  # where it is damaged, that is the reason
        _require_ours(destination, foreign)
        return _own(job, destination) if resume else None
    progress = Progress.load(scratch, job.fingerprint)
    if progress is None:
        if {path.name for path in destination.iterdir()} <= {SCRATCH_NAME}:  # empty, or stopped before its first note
            return None
        advice = "" if foreign else " or pass --overwrite"
        raise CheckpointError(
            f"{destination}: is not empty and holds no unfinished conversion; choose another folder{advice}"
        )
    _require_ours(destination, foreign)
    if not resume:
        raise CheckpointError(
            f"{destination}: holds an unfinished conversion; allow resume=True, or pass overwrite=True"
        )
    if job.source_mtime_ns() > progress.source_mtime_ns:
        raise CheckpointError(
            f"{destination}: the source was modified while it was converted; pass --overwrite to start again"
        )
    return progress


def _require_ours(destination: Path, foreign: list[str]) -> None:
    if foreign:
        more = f" (and {len(foreign) - 1} more)" if len(foreign) > 1 else ""
        raise CheckpointError(
            f"{destination / foreign[0]}: was not written by swapq{more}, and only what an earlier conversion or export wrote is ever "
            "replaced; choose another folder, or remove it first"
        )


def _own(job: Job, destination: Path) -> Progress | None:
    """Progress of this very conversion of a source that did not change since; None for whatever else is there."""
    try:
        progress = Progress.load(destination / SCRATCH_NAME, job.fingerprint)
    except CheckpointError:
        return None
    if progress is None or (destination / RECORD_NAME).exists() or job.source_mtime_ns() > progress.source_mtime_ns:
        return None
    return progress
