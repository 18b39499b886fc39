"""Files written whole or not at all: a temporary beside the target, fsync, the umask's mode, then a rename."""

import json
import operator
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from huggingface_hub.serialization._base import parse_size_to_int
from safetensors.torch import save_file
from torch import Tensor

from swapq.errors import CheckpointError, UnsupportedError
from swapq.headers import INDEX_NAME, SHARD_NAME, SINGLE_NAME

__all__ = ["ShardWriter", "publish", "remove_temporaries", "shard_bytes", "write_json", "write_text"]

#: temporaries of this file, which a kill leaves in the folder
_TEMPORARY = re.compile(r"\.(shard-\d{5,}|mode|.+\.json)\.[0-9a-f]{8}\.tmp")


def publish(temporary: Path, target: Path) -> None:
    """Make a finished file durable and rename it into place."""
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, target)


def remove_temporaries(folder: Path) -> None:
    """Remove what a killed export left under names that only this file gives."""
    for path in sorted(folder.iterdir()):
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _new_file_mode(directory: Path) -> int:
    """The mode that the umask gives a new file here. Asked of the system: to read the umask is to change it for every thread."""
    probe = directory / f".mode.{secrets.token_hex(4)}.tmp"
    probe.touch()
    try:
        return stat.S_IMODE(probe.stat().st_mode)
    finally:
        probe.unlink()


def write_json(path: Path, content: Mapping[str, Any], *, scratch: Path | None = None) -> None:
    """Write ``content`` to ``path``, whole or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n", scratch=scratch)


def write_text(path: Path, text: str, *, scratch: Path | None = None) -> None:
    """Write ``text`` to ``path`` in UTF-8, whole or not at all. A kill may leave a temporary, in ``scratch`` where it is given."""
    temporary = (scratch or path.parent) / f".{path.name}.{secrets.token_hex(4)}.tmp"
    temporary.write_text(text, encoding="utf-8")
    publish(temporary, path)


def shard_bytes(size: "int | str") -> int:
    """Bytes of a ``max_shard_size``: a whole number, or a string such as ``"5GB"``.

    Raises:
        UnsupportedError: neither, or below 1.
    """
    try:
        if isinstance(size, str):
            found = int(size) if size.isascii() and size.isdigit() else parse_size_to_int(size)
        else:
            found = operator.index(0 if isinstance(size, bool) else size)
    except (ValueError, TypeError, OverflowError):
        raise UnsupportedError(f"max_shard_size is {size!r}; give bytes, or a string such as '5GB'") from None
    if found < 1:
        raise UnsupportedError(f"max_shard_size is {size!r}; give at least one byte")
    return found


class ShardWriter:
    """Collects tensors, writes shards of at most ``max_shard_size`` and, at the end, the index. A context manager.

    An earlier checkpoint in the folder stays whole until the block has ended without an error; then the files in ``replaces``, its
    config first, are removed before the shards, so that nothing ever describes shards of another. Temporaries never stay, and those of a
    run that was killed are removed. ``announce`` is told the name and the bytes of each new shard before the first file is replaced.

    Raises:
        CheckpointError: a name given twice.
        UnsupportedError: a shard size that is not one.
    """

    def __init__(
        self,
        directory: Path,
        max_shard_size: "int | str",
        *,
        replaces: tuple[str, ...] = (),
        announce: Callable[[Mapping[str, int]], object] | None = None,
    ) -> None:
        self.directory, self.replaces, self.announce = directory, replaces, announce
        self.limit = shard_bytes(max_shard_size)
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = self.total_bytes = 0
        self.shards: list[tuple[Path, list[str]]] = []
        self.names: set[str] = set()

    def __enter__(self) -> "ShardWriter":
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_temporaries(self.directory)
        return self

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; it is copied to contiguous CPU memory of its own."""
        if name in self.names:
            raise CheckpointError(f"{name}: given twice; a checkpoint holds each name once")
        self.names.add(name)
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.pending_bytes + size > self.limit:
            self._flush()
        self.pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self.pending_bytes += size
        self.total_bytes += size

    def _flush(self) -> None:
        temporary = self.directory / f".shard-{len(self.shards):05d}.{secrets.token_hex(4)}.tmp"
        self.shards.append((temporary, list(self.pending)))
        save_file(self.pending, temporary, metadata={"format": "pt"})
        self.pending, self.pending_bytes = {}, 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                if self.pending or not self.shards:
                    self._flush()
                self._finish()
            finally:
                self._clean()
        else:
            self._clean()

    def _clean(self) -> None:
        for temporary, _ in self.shards:
            temporary.unlink(missing_ok=True)

    def _finish(self) -> None:
        count = len(self.shards)
        named = (
            [SINGLE_NAME] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        )
        if self.announce is not None:
            self.announce({file: path.stat().st_size for (path, _), file in zip(self.shards, named, strict=True)})
        for name in self.replaces:
            (self.directory / name).unlink(missing_ok=True)
        for old in sorted(self.directory.glob("model*.safetensors*")):
            if old.name not in named and (SHARD_NAME.fullmatch(old.name) or old.name == INDEX_NAME):
                old.unlink()
        weight_map: dict[str, str] = {}
        mode = _new_file_mode(self.directory)
        for (temporary, names), file in zip(self.shards, named, strict=True):
            os.chmod(temporary, mode)  # safetensors makes files that only their owner can read
            publish(temporary, self.directory / file)
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            write_json(
                self.directory / INDEX_NAME, {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            )
