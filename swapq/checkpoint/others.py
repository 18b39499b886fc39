"""What lies beside the weights of a source: tokenizer, chat template, code. Checked before anything is written, copied at the end.

A folder is untrusted: a symbolic link may lead to a file inside the folder or, in the Hub's cache, to a blob of the same repository.
Any other link would carry a stranger's choice of our files into the destination, and perhaps to the Hub.
"""

import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from swapq.checkpoint.record import RECORD_NAME
from swapq.checkpoint.writer import publish
from swapq.errors import CheckpointError
from swapq.headers import INDEX_NAME, require_text

__all__ = ["Others"]

#: files that hold weights in some form: shards are made anew, the rest is never read or copied
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".pkl",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
    ".safetensors.index.json",
)
#: written by the conversion itself
_OURS = {"config.json", "hf_quant_config.json", RECORD_NAME, INDEX_NAME, "pytorch_model.bin.index.json"}


@dataclass(frozen=True, slots=True)
class Others:
    """Files to copy, relative to the folder, and what is left out: weights in a form that is never read, and linked folders."""

    folder: Path
    names: tuple[str, ...]
    left_out: tuple[str, ...]
    nbytes: int

    @classmethod
    def of(cls, folder: Path, shards: Collection[str]) -> "Others":
        """Everything in ``folder`` but ``shards``, the configs and what is hidden (a name that starts with a dot).

        Raises:
            CheckpointError: a link that leads out of the folder, a file that cannot be read, or a name that is not UTF-8.
        """
        root, names, left_out, nbytes = folder.resolve(), [], [], 0
        for name in sorted(_walk(folder)):
            require_text(folder, name)
            path = folder / name
            if name in _OURS or name in shards:
                continue
            if path.name.endswith(_WEIGHTS) or not path.is_file():  # a linked folder, a pipe, a dangling link
                left_out.append(name)
                continue
            _check_link(path, root)
            if not os.access(path, os.R_OK):
                raise CheckpointError(f"{path}: cannot be read by this user; change its mode or remove it")
            names.append(name)
            nbytes += path.stat().st_size
        return cls(folder, tuple(names), tuple(left_out), nbytes)

    def copy(self, destination: Path, scratch: Path) -> None:
        """Copy byte for byte, each file whole or not at all; ``scratch`` is a folder on the destination's file system."""
        temporary = scratch / "other.partial"
        for name in self.names:
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            shutil.copyfile(self.folder / name, temporary)
            publish(temporary, destination / name)


def _walk(folder: Path) -> Iterator[str]:
    """Names of files and of linked folders, relative, without what is hidden."""
    for at, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        here = Path(at).relative_to(folder)
        links = [name for name in folders if (Path(at) / name).is_symlink()]
        yield from (str(here / name) for name in (*files, *links) if not name.startswith("."))


def _check_link(path: Path, root: Path) -> None:
    target = path.resolve()
    if target.is_relative_to(root):
        return
    if root.parent.name == "snapshots" and target.is_relative_to(root.parent.parent / "blobs"):
        return
    raise CheckpointError(
        f"{path}: is a link to {target}, outside the folder; put the file itself there, or remove the link"
    )
