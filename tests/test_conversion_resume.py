"""Stopped at any moment, continued by the same command; a source that changes, an earlier conversion, and what a kill leaves behind."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import swapq
from swapq.checkpoint import conversion, writer
from swapq.checkpoint.record import PROGRESS_NAME, SCRATCH_NAME
from tests.helpers.models import qwen3_moe


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours handles it."""


@pytest.fixture
def src(tmp_path: Path) -> Path:
    qwen3_moe().to(torch.bfloat16).save_pretrained(tmp_path / "src")
    (tmp_path / "src" / "tokenizer.json").write_text("{}")
    (tmp_path / "src" / "sub").mkdir()
    (tmp_path / "src" / "sub" / "vocab.txt").write_text("a")
    return tmp_path / "src"


def convert(src: Path, dst: Path, **options: Any) -> Any:
    return swapq.convert_checkpoint(src, dst, "nvfp4-rl", progress=False, max_shard_size=30_000, **options)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_run_stopped_before_any_of_its_renames_is_finished_by_the_same_command(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rename publishes the progress file, the last one the completion record: 20 moments between."""
    convert(src, tmp_path / "whole")
    expected, real = files(tmp_path / "whole"), os.replace
    renames = 0

    def count(a: Any, b: Any) -> None:
        nonlocal renames
        renames += 1
        real(a, b)

    monkeypatch.setattr(os, "replace", count)
    convert(src, tmp_path / "counted")
    for moment in range(renames):
        dst, left = tmp_path / f"dst{moment}", moment

        def stop(a: Any, b: Any) -> None:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            real(a, b)

        monkeypatch.setattr(os, "replace", stop)
        with pytest.raises(Killed):
            convert(src, dst)
        if (dst / "config.json").exists():  # loadable: then it is all there
            assert {k: v for k, v in files(dst).items() if k in expected} == {
                k: v for k, v in expected.items() if k != "swapq.json"
            }
        monkeypatch.setattr(os, "replace", real)
        convert(src, dst)
        assert files(dst) == expected


def test_a_kill_after_the_record_leaves_only_scratch_and_the_same_command_removes_it(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst = tmp_path / "dst"

    def stop(path: Any, **_: Any) -> None:
        raise Killed

    monkeypatch.setattr(conversion.shutil, "rmtree", stop)
    with pytest.raises(Killed):
        convert(src, dst)
    monkeypatch.undo()
    assert (dst / SCRATCH_NAME).exists()
    assert convert(src, dst).already_done
    assert not (dst / SCRATCH_NAME).exists()
    assert swapq.verify(dst).ok


def test_temporaries_of_a_kill_do_not_stay(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dst, real = tmp_path / "dst", writer.publish

    def stop(temporary: Path, target: Path) -> None:
        if target.name == "config.json":
            raise Killed
        real(temporary, target)

    monkeypatch.setattr(writer, "publish", stop)
    with pytest.raises(Killed):
        convert(src, dst)
    monkeypatch.undo()
    convert(src, dst)
    assert not [name for name in files(dst) if Path(name).name.startswith(".")]


def interrupted(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> set[str]:
    """Stop after three shards; their names."""
    real = conversion.Progress.save

    def stop(self: conversion.Progress) -> None:
        real(self)
        if len(self.shards) == 3:
            raise Killed

    monkeypatch.setattr(conversion.Progress, "save", stop)
    with pytest.raises(Killed):
        convert(src, dst, **options)
    monkeypatch.undo()
    return {p.name for p in dst.glob("*.safetensors")}


def test_an_interrupted_overwrite_is_gone_on_with_too(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst = tmp_path / "dst"
    swapq.convert_checkpoint(src, dst, "mxfp8-rl", progress=False)
    assert len(interrupted(src, dst, monkeypatch, overwrite=True)) == 3
    assert convert(src, dst, overwrite=True).resumed == 3
    assert swapq.verify(dst, source=src).ok


def test_without_resume_an_overwrite_starts_over(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dst = tmp_path / "dst"
    interrupted(src, dst, monkeypatch)
    assert convert(src, dst, overwrite=True, resume=False).resumed == 0
    assert swapq.verify(dst, source=src).ok


def touch_later(src: Path) -> None:
    path = src / "model.safetensors"
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1))


def test_a_source_that_changed_between_two_runs_is_noticed_whatever_the_clock_says(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(src / "model.safetensors", (2e9, 2e9))  # a clock that is ahead: no reason to distrust the run
    dst = tmp_path / "dst"
    interrupted(src, dst, monkeypatch)
    touch_later(src)
    with pytest.raises(swapq.SwapqError, match="modified while"):
        convert(src, dst)
    convert(src, dst, overwrite=True)
    assert convert(src, dst).already_done
    touch_later(src)
    with pytest.raises(swapq.SwapqError, match="modified after"):
        convert(src, dst)


def test_a_source_that_changes_during_the_run_ends_in_an_error_and_no_checkpoint(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = conversion.stream

    def changing(*args: Any, **options: Any) -> None:
        real(*args, **options)
        touch_later(src)

    monkeypatch.setattr(conversion, "stream", changing)
    with pytest.raises(swapq.SwapqError, match="modified while it was converted"):
        convert(src, tmp_path / "dst")
    assert not (tmp_path / "dst" / "config.json").exists()


def test_an_overwrite_removes_what_the_earlier_conversion_copied(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    convert(src, dst)
    (dst / "mine.txt").write_text("mine")
    (src / "tokenizer.json").unlink()
    (src / "chat_template.jinja").write_text("new")
    convert(src, dst, overwrite=True)
    assert not (dst / "tokenizer.json").exists()
    assert (dst / "chat_template.jinja").read_text() == "new"
    assert (dst / "sub" / "vocab.txt").exists()
    assert (dst / "mine.txt").read_text() == "mine"


def test_an_overwrite_removes_nothing_outside_the_folder(src: Path, tmp_path: Path) -> None:
    dst, outside = tmp_path / "dst", tmp_path / "outside.txt"
    convert(src, dst)
    outside.write_text("mine")
    (dst / "link").symlink_to(tmp_path)
    record = json.loads((dst / "swapq.json").read_text())
    record["files"] = ["../outside.txt", str(outside), "link/outside.txt", 5, "sub/../../outside.txt"]
    (dst / "swapq.json").write_text(json.dumps(record))
    convert(src, dst, overwrite=True)
    assert outside.read_text() == "mine"


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "{", '{"fingerprint": 1}', '{"fingerprint": "F", "source_mtime_ns": 0, "shards": []}',
     '{"fingerprint": "F", "source_mtime_ns": 0, "shards": {"../x": {}}}', '{"fingerprint": "F", "source_mtime_ns": "0", "shards": {}}',
     '{"fingerprint": "F", "source_mtime_ns": 0, "shards": {"a": 5}}'],
)  # fmt: skip
def test_a_damaged_progress_file_is_refused_and_no_shard_is_removed_that_it_may_not_have_listed(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    dst = tmp_path / "dst"
    interrupted(src, dst, monkeypatch)
    path = dst / SCRATCH_NAME / PROGRESS_NAME
    path.write_text(content.replace('"F"', json.dumps(json.loads(path.read_text())["fingerprint"])))
    before = files(dst)
    for overwrite in (False, True):
        with pytest.raises(
            swapq.SwapqError, match=f"{PROGRESS_NAME}: is no progress of a conversion.* remove {dst} or"
        ):
            convert(src, dst, overwrite=overwrite)
    assert {k: v for k, v in files(dst).items() if not k.endswith("lock")} == {
        k: v for k, v in before.items() if not k.endswith("lock")
    }
    for shard in dst.glob("*.safetensors"):
        shard.unlink()
    convert(src, dst, overwrite=True)
    assert swapq.verify(dst, source=src).ok


@pytest.mark.parametrize(
    "shards", [None, [], {"a": 5}, {"../../etc": {"bytes": 1}}, {"model.safetensors": {"bytes": "x"}}]
)
def test_a_damaged_record_is_refused_and_never_an_accident(src: Path, tmp_path: Path, shards: object) -> None:
    dst = tmp_path / "dst"
    convert(src, dst)
    record = json.loads((dst / "swapq.json").read_text())
    (dst / "swapq.json").write_text(json.dumps(record | {"shards": shards}))
    with pytest.raises(swapq.SwapqError):
        convert(src, dst)
    assert not swapq.verify(dst).ok
    convert(src, dst, overwrite=True)
    assert swapq.verify(dst, source=src).ok


def test_a_shard_of_the_right_size_with_other_bytes_does_not_pass_verify(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    convert(src, dst)
    shard = sorted(dst.glob("*.safetensors"))[0]
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    assert any("SHA-256" in p for p in swapq.verify(dst).problems)
    assert load_file(shard)


@pytest.mark.parametrize("what", ["a checkpoint", "shards alone", "a config alone", "a tokenizer alone"])
def test_an_overwrite_never_replaces_what_swapq_did_not_write(src: Path, tmp_path: Path, what: str) -> None:
    dst = tmp_path / "dst"
    dst.mkdir()
    kept = {
        "a checkpoint": "*",
        "shards alone": "*.safetensors",
        "a config alone": "config.json",
        "a tokenizer alone": "tok*",
    }
    for path in src.glob(kept[what]):
        if path.is_file():
            (dst / path.name).write_bytes(path.read_bytes())
    before = files(dst)
    with pytest.raises(swapq.SwapqError, match=r"holds no unfinished conversion; choose another folder$"):
        convert(src, dst)
    with pytest.raises(swapq.SwapqError, match="was not written by swapq") as refused:
        convert(src, dst, overwrite=True)
    assert any(str(dst / name) in str(refused.value) for name in before)
    assert files(dst) == before


def test_an_overwrite_never_replaces_masters_that_were_saved_into_an_export(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    model = swapq.convert(qwen3_moe().to(torch.bfloat16), "nvfp4-rl", last_layers_bf16=0)
    swapq.export(model, dst)
    model.save_pretrained(dst)
    before = files(dst)
    with pytest.raises(swapq.SwapqError, match=r"config\.json: was not written by swapq"):
        convert(src, dst, overwrite=True)
    with pytest.raises(swapq.SwapqError, match="swapq did not write"):
        swapq.export(model, dst)
    assert files(dst) == before


@pytest.mark.parametrize("layout", ["swapq", "modelopt", "compressed-tensors"])
def test_an_overwrite_replaces_an_export_and_the_tokenizer_beside_it(src: Path, tmp_path: Path, layout: str) -> None:
    dst = tmp_path / "dst"
    swapq.export(swapq.convert(qwen3_moe(), "nvfp4-rl", last_layers_bf16=0), dst, layout=layout)
    (dst / "tokenizer.json").write_text("old")
    convert(src, dst, overwrite=True)
    assert (dst / "tokenizer.json").read_text() == "{}"
    assert swapq.verify(dst, source=src).ok


def test_weights_that_came_into_a_converted_folder_later_are_refused_by_name(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    convert(src, dst)
    (dst / "adapter_model.safetensors").write_bytes(b"mine")
    with pytest.raises(swapq.SwapqError, match=r"adapter_model\.safetensors: was not written by swapq"):
        convert(src, dst, overwrite=True, resume=False)
    assert (dst / "adapter_model.safetensors").read_bytes() == b"mine"


def test_an_overwrite_that_stopped_while_it_removed_the_old_files_goes_on(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst, real = tmp_path / "dst", Path.unlink
    convert(src, dst)

    def stop(self: Path, missing_ok: bool = False) -> None:
        if self.suffix == ".safetensors":
            raise Killed
        real(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", stop)
    with pytest.raises(Killed):
        convert(src, dst, overwrite=True)
    monkeypatch.undo()
    assert not (dst / "config.json").exists()
    convert(src, dst, overwrite=True)
    assert swapq.verify(dst, source=src).ok
