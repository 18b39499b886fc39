"""convert_checkpoint: what else a folder holds beside tensors, and what the same command does in it again."""

import json
import os
import stat
from pathlib import Path

import pytest

import swapq
from swapq.checkpoint import conversion
from tests.helpers.conversions import convert, file_hashes, saved

# What else lies in the folder


def test_everything_else_arrives_byte_for_byte(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    others = {
        "tokenizer.json": b'{"a": 1}',
        "chat_template.jinja": b"{{ messages }}\r\n",
        "modeling_custom.py": b"x = 1\n",
        "tokenizer.model": bytes(range(256)),
        "sub/vocab.txt": b"a\nb\n",
    }
    for name, content in others.items():
        (src / name).parent.mkdir(exist_ok=True)
        (src / name).write_bytes(content)
    (src / "old.bin").write_bytes(b"pickle")
    done = convert(src, tmp_path / "dst")
    for name, content in others.items():
        assert (tmp_path / "dst" / name).read_bytes() == content
    assert (tmp_path / "dst" / "generation_config.json").read_bytes() == (src / "generation_config.json").read_bytes()
    assert not (tmp_path / "dst" / "old.bin").exists()
    assert done.left_out == ("old.bin",)


def test_the_source_is_not_modified_and_stale_quantization_settings_do_not_survive(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in src.iterdir()}
    convert(src, tmp_path / "dst")
    assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in src.iterdir()} == before
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    original = json.loads((src / "config.json").read_text())
    assert {k: v for k, v in config.items() if k != "quantization_config"} == original


def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    before = os.umask(0o027)
    try:
        convert(src, tmp_path / "dst")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "dst").iterdir()} == {0o640}


def test_a_finished_folder_holds_no_scratch_and_a_record_with_true_hashes(tmp_path: Path) -> None:
    convert(saved(tmp_path / "src"), tmp_path / "dst", max_shard_size=50_000)
    record = json.loads((tmp_path / "dst" / "swapq.json").read_text())
    assert not (tmp_path / "dst" / ".swapq").exists()
    assert {k: v["sha256"] for k, v in record["shards"].items()} == file_hashes(tmp_path / "dst")


# Again


def test_the_same_command_again_touches_nothing(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    convert(src, tmp_path / "dst")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "dst").iterdir()}
    assert convert(src, tmp_path / "dst").already_done
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "dst").iterdir()} == before


def test_another_recipe_into_a_finished_folder_is_refused_and_overwrite_replaces_it(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    convert(src, tmp_path / "dst", max_shard_size=30_000)
    with pytest.raises(swapq.SwapqError, match="finished conversion of another"):
        convert(src, tmp_path / "dst", "mxfp8-rl")
    convert(src, tmp_path / "dst", "mxfp8-rl", overwrite=True)
    convert(src, tmp_path / "fresh", "mxfp8-rl")
    assert file_hashes(tmp_path / "dst") == file_hashes(tmp_path / "fresh")


def test_a_changed_source_is_noticed(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    convert(src, tmp_path / "dst")
    os.utime(src / "model.safetensors", (2e9, 2e9))
    with pytest.raises(swapq.SwapqError, match="modified after"):
        convert(src, tmp_path / "dst")


def test_an_interrupted_run_is_finished_without_redoing_its_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, dst = saved(tmp_path / "src"), tmp_path / "dst"
    convert(src, tmp_path / "whole", max_shard_size=30_000)
    real = conversion.Progress.save

    def stop_after_three(self: conversion.Progress) -> None:
        real(self)
        if len(self.shards) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(conversion.Progress, "save", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        convert(src, dst, max_shard_size=30_000)
    monkeypatch.undo()
    assert not (dst / "config.json").exists()
    kept = {p.name: p.stat().st_mtime_ns for p in dst.glob("*.safetensors")}
    assert len(kept) == 3
    done = convert(src, dst, max_shard_size=30_000)
    assert done.resumed == 3
    assert {p.name: p.stat().st_mtime_ns for p in dst.glob("*.safetensors") if p.name in kept} == kept
    assert file_hashes(dst) == file_hashes(tmp_path / "whole")
