"""Every check of a conversion that can fail before its first byte: folders, space, permissions, an earlier run."""

import os
import shutil
from pathlib import Path

from swapq.checkpoint.job import Job
from swapq.checkpoint.record import RECORD_NAME, SCRATCH_NAME, Progress, read_record
from swapq.errors import CheckpointError

__all__ = ["check_folders", "check_space", "is_complete", "resumable"]

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
    nearest = dst
    while not nearest.exists():
        nearest = nearest.parent
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


def check_space(job: Job, destination: Path, done: set[str]) -> None:
    """Room for what is still to be written.

    Raises:
        CheckpointError: with the bytes needed and free.
    """
    needed = sum(shard.nbytes for shard in job.shards if shard.file not in done) + _MARGIN
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
    if _newest(job) > (destination / RECORD_NAME).stat().st_mtime:
        raise CheckpointError(
            f"{destination}: the source was modified after it was converted; pass --overwrite to convert it again"
        )
    return True


def resumable(job: Job, destination: Path, *, overwrite: bool, resume: bool) -> Progress | None:
    """Progress of an interrupted run of the same conversion, None to start afresh in an empty or new folder.

    Raises:
        CheckpointError: the folder is not empty and holds no such run.
    """
    scratch = destination / SCRATCH_NAME
    if overwrite or not destination.is_dir() or not any(destination.iterdir()):
        return None
    progress = Progress.load(scratch, job.fingerprint)
    if progress is None:
        raise CheckpointError(
            f"{destination}: is not empty and holds no unfinished conversion; choose another folder or pass --overwrite"
        )
    if not resume:
        raise CheckpointError(
            f"{destination}: holds an unfinished conversion; allow resume=True, or pass overwrite=True"
        )
    if _newest(job) > progress.path.stat().st_mtime:
        raise CheckpointError(
            f"{destination}: the source was modified while it was converted; pass --overwrite to start again"
        )
    return progress


def _newest(job: Job) -> float:
    return max((job.source.path / file).stat().st_mtime for file in job.source.files)
