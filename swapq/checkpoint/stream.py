"""The workers of a conversion: read a unit, make its tensors, write them at their places. One unit in memory per worker."""

import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from swapq.checkpoint.arena import Arena
from swapq.checkpoint.job import HASH_BUFFER, Job, Shard
from swapq.checkpoint.layouts import Layout
from swapq.checkpoint.raw import as_bytes
from swapq.checkpoint.source import SourceFiles, expanded, quantized, vanished_blocks
from swapq.checkpoint.units import COPY_BUFFER, Copy, Expand, Quantize, Unit
from swapq.errors import CheckpointError
from swapq.headers import TensorHeader
from swapq.kernels import cpu

__all__ = ["stream"]


class _Output:
    """One shard under its temporary name, written by position, published when its last unit is done."""

    def __init__(self, shard: Shard, temporary: Path) -> None:
        self.shard, self.temporary = shard, temporary
        self.left, self.lock = len(shard.units), threading.Lock()
        self.descriptor = -1

    def open(self) -> None:
        with self.lock:
            if self.descriptor < 0:
                self.descriptor = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
                self.write(0, memoryview(self.shard.header))

    def write(self, position: int, data: memoryview) -> None:
        while data:
            done = os.pwrite(self.descriptor, data, position)
            data, position = data[done:], position + done

    def finished_unit(self) -> bool:
        """Whether this was the last one."""
        with self.lock:
            self.left -= 1
            return self.left == 0

    def publish(self, target: Path, arena: Arena) -> str:
        """Make the file durable and hash it, both at the same time, and give it its name; the SHA-256."""
        os.ftruncate(self.descriptor, self.shard.nbytes)
        with ThreadPoolExecutor(1, thread_name_prefix="swapq-fsync") as beside:
            durable = beside.submit(os.fsync, self.descriptor)
            sha256 = self._sha256(arena)
            durable.result()
        self.close()
        os.replace(self.temporary, target)
        return sha256

    def _sha256(self, arena: Arena) -> str:
        arena.begin(HASH_BUFFER)
        buffer = as_bytes(arena.take((HASH_BUFFER,), torch.uint8))
        digest, position = hashlib.sha256(), 0
        while count := os.preadv(self.descriptor, [buffer], position):
            digest.update(buffer[:count])
            position += count
        return digest.hexdigest()

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def stream(
    job: Job,
    folder: Path,
    scratch: Path,
    skip: set[str],
    *,
    workers: int,
    on_bytes: Callable[[int], None],
    on_shard: Callable[[Shard, str, int], None],
) -> None:
    """Write every shard of ``job`` that is not in ``skip`` to ``folder``.

    Args:
        scratch: folder on the same file system, for files that are not whole.
        workers: threads. The bytes written do not depend on it.
        on_bytes: told how many source bytes a finished unit had; called from the workers.
        on_shard: told each published shard, its SHA-256 and its count of underflowed blocks; one call at a time.

    Raises:
        FormatError: a weight that is not finite, by name.
        CheckpointError: a source that ends early, or a disk that is full.
    """
    files = SourceFiles(job.source.path)
    outputs = {s.file: _Output(s, scratch / f"{s.file}.partial") for s in job.shards if s.file not in skip}
    underflowed: dict[str, int] = dict.fromkeys(outputs, 0)
    lock = threading.Lock()
    stop = threading.Event()
    own = threading.local()
    cpu.prepare(sorted(set(job.plan.quantized.values())))

    def work(output: _Output, unit: Unit) -> None:
        if stop.is_set():
            return
        output.open()
        arena = own.__dict__.setdefault("arena", Arena())
        arena.begin(unit.arena_bytes)
        vanished = _carry_out(unit, job.layout, files, output, arena)
        on_bytes(unit.source_bytes)
        with lock:
            underflowed[output.shard.file] += vanished
        if output.finished_unit():
            sha256 = output.publish(folder / output.shard.file, arena)
            with lock:
                on_shard(output.shard, sha256, underflowed[output.shard.file])

    try:
        _run([(o, u) for o in outputs.values() for u in o.shard.units], work, workers, stop)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or folder}: {error.strerror or error}; free space or repair it, and run the same command again"
        ) from error
    finally:
        files.close()
        for output in outputs.values():
            output.close()


def _run(
    tasks: "list[tuple[_Output, Unit]]", work: "Callable[[_Output, Unit], None]", workers: int, stop: threading.Event
) -> None:
    """Hand the tasks out in order, few at a time; the first error stops the rest."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the workers are the parallelism
    try:
        with ThreadPoolExecutor(workers, thread_name_prefix="swapq-convert") as pool:
            pending: set[Future[None]] = set()
            for output, unit in tasks:
                if len(pending) >= 2 * workers:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    _raise_first(done, stop)
                pending.add(pool.submit(work, output, unit))
            done, _ = wait(pending, return_when=FIRST_EXCEPTION)
            _raise_first(done, stop)
    finally:
        torch.set_num_threads(before)


def _raise_first(done: "set[Future[None]]", stop: threading.Event) -> None:
    for future in done:
        error = future.exception()
        if error is not None:
            stop.set()
            raise error


def _carry_out(unit: Unit, layout: Layout, files: SourceFiles, output: _Output, arena: Arena) -> int:
    """Make and write one unit; how many non-zero blocks vanished."""
    if isinstance(unit, Copy):
        _copy(unit.source, files, output, arena)
        return 0
    if isinstance(unit, Expand):
        output.write(output.shard.offsets[unit.outputs[0].name], as_bytes(expanded(unit, files, arena)))
        return 0
    return _quantize(unit, layout, files, output, arena)


def _copy(source: TensorHeader, files: SourceFiles, output: _Output, arena: Arena) -> None:
    buffer = as_bytes(arena.take((min(COPY_BUFFER, source.nbytes),), torch.uint8))
    position, into = source.start, output.shard.offsets[source.name]
    while position < source.end:
        piece = buffer[: source.end - position]
        files.read_into(source.file, position, piece, source.name)
        output.write(into, piece)
        position, into = position + len(piece), into + len(piece)


def _quantize(unit: Quantize, layout: Layout, files: SourceFiles, output: _Output, arena: Arena) -> int:
    vanished = 0
    for target, rows, parts in quantized(unit, files, arena):
        vanished += vanished_blocks(rows, target.fmt, parts)
        for name, tensor in layout.encode(target.weight, target.fmt, parts, arena.take).items():
            output.write(output.shard.offsets[name], as_bytes(tensor))
    return vanished
