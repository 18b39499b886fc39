"""``swapq.convert_checkpoint``: a folder becomes a quantized folder, streaming, resumable, whole or not at all.

Order of writing: shards one by one (durable, then renamed into place), other files, index, config, and last the completion record
``swapq.json``. Until the config is there, no loader takes the folder for a checkpoint.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import (
    Progress as Bar,
)

from swapq.checkpoint import layouts
from swapq.checkpoint.job import Job, Shard
from swapq.checkpoint.others import Others
from swapq.checkpoint.preflight import check_folders, check_space, is_complete, resumable
from swapq.checkpoint.record import LOCK_NAME, RECORD_NAME, SCRATCH_NAME, Progress, completion
from swapq.checkpoint.stream import stream
from swapq.checkpoint.writer import remove_temporaries, shard_bytes, write_json
from swapq.errors import CheckpointError, UnsupportedError
from swapq.headers import INDEX_NAME, read_folder, read_json
from swapq.kernels import cpu
from swapq.plan import Plan, plan
from swapq.recipe import Recipe

__all__ = ["Conversion", "convert_checkpoint"]

#: more threads than this help nobody
_MOST_WORKERS = 256


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion did.

    Attributes:
        plan: the plan it carried out.
        shards: shard -> bytes, SHA-256 and underflowed blocks.
        already_done: the destination was finished before, and nothing was touched.
        resumed: shards that an earlier run had finished.
        left_out: files of the source that were not copied: weights in a form that is never read, weights beside the ones that the
            index lists, linked folders, and what is no file.
        memory_bound: bytes that the workers held at most, beside the program itself.
    """

    plan: Plan
    shards: Mapping[str, Mapping[str, Any]]
    already_done: bool
    resumed: int
    left_out: tuple[str, ...]
    memory_bound: int

    @property
    def output_bytes(self) -> int:
        return sum(int(said["bytes"]) for said in self.shards.values())

    @property
    def underflowed_blocks(self) -> int:
        """Non-zero blocks that dequantize to zeros."""
        return sum(int(said.get("underflowed_blocks", 0)) for said in self.shards.values())


def convert_checkpoint(
    source: "str | os.PathLike[str]",
    destination: "str | os.PathLike[str]",
    recipe: "str | Recipe | Mapping[str, Any] | os.PathLike[str]",
    *,
    layout: str = "swapq",
    workers: int = 1,
    overwrite: bool = False,
    resume: bool = True,
    max_shard_size: "int | str" = "5GB",
    progress: bool = True,
) -> Conversion:
    """Convert a Hugging Face folder of safetensors. Each source byte is read once, each output byte written once.

    Args:
        source: BF16, FP16, FP32 or block-FP8 (DeepSeek style) checkpoint; never modified.
        destination: a new or empty folder, or one of an interrupted run of the same conversion.
        recipe: see :func:`swapq.convert`.
        layout: one of :func:`swapq.checkpoint.layouts.names`.
        workers: threads, 1 to 256; the bytes written do not depend on it.
        overwrite: replace what an earlier conversion or export wrote to the destination, and nothing else. An unfinished run of this very
            conversion is gone on with, unless ``resume`` is False.
        resume: go on where an interrupted run of the same conversion stopped.
        max_shard_size: bytes, or a string such as ``"5GB"``.
        progress: show a bar with rate and time left on stderr, and a note where numba is missing.

    Raises:
        RecipeError, AnatomyError, PlanError: see :func:`swapq.plan`; before anything is written. RecipeError also for a recipe that is
            not for rollouts.
        CheckpointError: a damaged or changing source, overlapping folders, too little space, a destination of something else.
        FormatError: a weight that is not finite, by name.
        UnsupportedError: an unknown layout, or a family that no engine reads per expert.
    """
    src, dst = Path(source), Path(destination)
    if not isinstance(workers, int) or isinstance(workers, bool) or not 1 <= workers <= _MOST_WORKERS:
        raise UnsupportedError(f"workers is {workers!r}; give a number from 1 to {_MOST_WORKERS}")
    try:
        return _convert(src, dst, recipe, layout, workers, overwrite, resume, max_shard_size, show=progress)
    except OSError as error:
        where = error.filename or destination
        raise CheckpointError(
            f"{where}: {error.strerror or error}; make room or repair it, and run the same command again"
        ) from error


def _convert(
    src: Path,
    dst: Path,
    recipe: "str | Recipe | Mapping[str, Any] | os.PathLike[str]",
    layout: str,
    workers: int,
    overwrite: bool,
    resume: bool,
    max_shard_size: "int | str",
    *,
    show: bool,
) -> Conversion:
    the_plan = plan(src, recipe)
    the_plan.recipe.require_rollout("a conversion writes what engines serve")
    job = Job.of(the_plan, read_folder(src), layouts.get(layout), shard_bytes(max_shard_size))
    check_folders(src, dst)
    scratch = dst / SCRATCH_NAME
    if not overwrite and is_complete(job, dst):
        if scratch.is_dir():  # stopped after the record and before it was removed, or a run that is about to
            with contextlib.suppress(CheckpointError, OSError), _alone(scratch):
                _remove(scratch)
        return _done_before(job, dst)
    others = Others.of(src, job.source.files)
    state = resumable(job, others, dst, overwrite=overwrite, resume=resume)
    check_space(job, others, dst, state.finished(dst) if state else set())
    config = _config(job)

    with _alone(scratch):
        if not overwrite and is_complete(job, dst):  # by a run that ended since
            _remove(scratch)
            return _done_before(job, dst)
        state = resumable(job, others, dst, overwrite=overwrite, resume=resume)
        if state is None:
            state = Progress.start(scratch, job)
            _clear(dst, scratch, state)
        elif state.replaces or state.copied:
            _clear(dst, scratch, state)
        done = state.finished(dst)
        _stream(job, dst, scratch, state, done, workers, show=show)
        if job.source_mtime_ns() > state.source_mtime_ns:
            raise CheckpointError(
                f"{src}: was modified while it was converted; pass --overwrite to convert what it is now"
            )
        others.copy(dst, scratch)
        _finish(job, dst, scratch, state, others, config)
        _remove(scratch)
    return Conversion(job.plan, dict(state.shards), False, len(done), others.left_out, job.memory_bound(workers))


def _config(job: Job) -> dict[str, Any]:
    """The source's config with our ``quantization_config`` in place of any other."""
    config = read_json(job.source.path / "config.json")
    for part in (config, *(v for v in config.values() if isinstance(v, dict))):
        part.pop("quantization_config", None)
        part.pop("compression_config", None)
    return config | {"quantization_config": job.layout.quantization_config(job.plan)}


def _done_before(job: Job, dst: Path) -> Conversion:
    return Conversion(job.plan, read_json(dst / RECORD_NAME)["shards"], True, 0, (), 0)


@contextmanager
def _alone(scratch: Path) -> Iterator[None]:
    """Make the scratch folder, and hold the destination against a second run at the same time."""
    with _lock(scratch) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.path.samestat(os.fstat(lock.fileno()), os.stat(scratch / LOCK_NAME))
        except OSError:  # also where the run that held it has just removed it
            held = False
        if not held:
            raise CheckpointError(
                f"{scratch.parent}: another conversion is writing here; wait for it or choose another folder"
            )
        yield
    with contextlib.suppress(
        OSError
    ):  # where an open file cannot be removed (NFS) this is the first moment; else it is gone or in use
        scratch.rmdir()


def _lock(scratch: Path) -> TextIO:
    while True:
        try:
            scratch.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{scratch.parent}: cannot be made ({error.strerror or error}); choose another folder"
            ) from None
        with contextlib.suppress(FileNotFoundError):  # removed between the two by a run that ended
            return open(scratch / LOCK_NAME, "w", encoding="utf-8")


def _remove(scratch: Path) -> None:
    """Remove the scratch folder, whose lock is held. What stays of it does no harm: the same command removes it."""
    shutil.rmtree(scratch, ignore_errors=True)


def _clear(dst: Path, scratch: Path, state: Progress) -> None:
    """Remove what an earlier conversion wrote, the config first: from here on the folder is no checkpoint. ``state`` names it, so that a
    run after a kill goes on with this; a tokenizer of another model must not stay."""
    for name in ("config.json", INDEX_NAME, RECORD_NAME, "hf_quant_config.json", *state.copied, *state.replaces):
        (dst / name).unlink(missing_ok=True)
    for path in (*scratch.glob("*.partial"), *scratch.glob(".*.tmp")):
        path.unlink()
    remove_temporaries(dst)
    if state.replaces or state.copied:
        state.replaces, state.copied = {}, []
        state.save()


def _stream(job: Job, dst: Path, scratch: Path, state: Progress, done: set[str], workers: int, *, show: bool) -> None:
    skipped = sum(u.source_bytes for s in job.shards if s.file in done for u in s.units)

    def on_shard(shard: Shard, sha256: str, underflowed: int) -> None:
        state.shards[shard.file] = {"bytes": shard.nbytes, "sha256": sha256, "underflowed_blocks": underflowed}
        state.save()

    if show and job.plan.quantized and not cpu.available():
        Console(stderr=True, soft_wrap=True).print(
            "note: numba is not installed, so quantizing takes five to fifty times as long; pip install 'swapq[convert]'",
            markup=False,
        )
    with _bar(job.source_bytes, skipped, show=show) as on_bytes:
        stream(job, dst, scratch, done, workers=workers, on_bytes=on_bytes, on_shard=on_shard)


@contextmanager
def _bar(total: int, start: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("Converting"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)  # a bar in a log file would be an empty line
    with Bar(*columns, console=console, transient=True, disable=not (show and console.is_terminal)) as bar:
        task = bar.add_task("convert", total=total, completed=start)
        yield lambda count: bar.advance(task, count)


def _finish(job: Job, dst: Path, scratch: Path, state: Progress, others: Others, config: dict[str, Any]) -> None:
    if len(job.shards) > 1:
        size = sum(len(s.header) for s in job.shards)
        index = {"metadata": {"total_size": job.output_bytes - size}, "weight_map": job.weight_map}
        write_json(dst / INDEX_NAME, index, scratch=scratch)
    for name, content in job.layout.extra_files(job.plan).items():
        write_json(dst / name, content, scratch=scratch)
    _fsync(dst)  # the names of the shards last before the config does
    write_json(dst / "config.json", config, scratch=scratch)
    _fsync(dst)
    write_json(dst / RECORD_NAME, completion(job, state, others.names, dst), scratch=scratch)
    _fsync(dst)


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
