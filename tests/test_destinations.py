"""What a destination held before: nothing that swapq did not write is removed or replaced, also after a kill."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

import swapq
from swapq.checkpoint import conversion, stream, writer
from swapq.checkpoint.record import PROGRESS_NAME, SCRATCH_NAME
from swapq.errors import CheckpointError
from tests.helpers.models import qwen3_moe


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours handles it."""


@pytest.fixture
def src(tmp_path: Path) -> Path:
    qwen3_moe().to(torch.bfloat16).save_pretrained(tmp_path / "src")
    (tmp_path / "src" / "tokenizer.json").write_text("{}")
    return tmp_path / "src"


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    return tmp_path / "dst"


def convert(src: Path, dst: Path, recipe: str = "nvfp4-rl", **options: Any) -> conversion.Conversion:
    return swapq.convert_checkpoint(src, dst, recipe, progress=False, max_shard_size=30_000, **options)


def live() -> PreTrainedModel:
    return swapq.convert(qwen3_moe(), "nvfp4-rl", last_layers_bf16=0)


def files(folder: Path) -> dict[str, bytes]:
    """All but locks, which every command makes."""
    found = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


def stopped(
    act: Callable[[], object], monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[..., bool]
) -> None:
    """Kill ``act`` where it would call ``owner.name`` with arguments that ``when`` takes."""
    real = getattr(owner, name)

    def stop(*arguments: Any, **options: Any) -> Any:
        if when(*arguments):
            raise Killed
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, stop)
    with pytest.raises(Killed):
        act()
    monkeypatch.undo()


def at_first_shard(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    stopped(lambda: convert(src, dst, **options), monkeypatch, stream._Output, "publish", lambda *_: True)


def after_two_shards(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    third = lambda output, *_: output.shard.file.startswith("model-00003")  # noqa: E731
    stopped(lambda: convert(src, dst, **options), monkeypatch, stream._Output, "publish", third)


def before_any_note(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    stopped(lambda: convert(src, dst, **options), monkeypatch, conversion.Progress, "save", lambda *_: True)


UNFINISHED = [before_any_note, at_first_shard, after_two_shards]


def refuse_all(src: Path, dst: Path) -> None:
    """Every mode refuses the folder and leaves each byte."""
    before = files(dst)
    for options in ({}, {"overwrite": True}, {"overwrite": True, "resume": False}, {"resume": False}):
        with pytest.raises(CheckpointError):
            convert(src, dst, **options)
        assert files(dst) == before, options
    with pytest.raises(CheckpointError):
        swapq.export(live(), dst)
    assert files(dst) == before


@pytest.mark.parametrize("stop", UNFINISHED)
@pytest.mark.parametrize("size", ["5GB", "200KB"])
def test_masters_saved_into_an_unfinished_conversion_are_never_replaced(
    src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch, stop: Any, size: str
) -> None:
    stop(src, dst, monkeypatch)
    qwen3_moe().save_pretrained(dst, max_shard_size=size)
    refuse_all(src, dst)
    with pytest.raises(CheckpointError, match=r"config\.json: was not written by swapq"):
        convert(src, dst, overwrite=True)


@pytest.mark.parametrize("stop", UNFINISHED)
@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00005.safetensors", "ema.safetensors"])
def test_a_shard_put_into_an_unfinished_conversion_is_refused_by_name(
    src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch, stop: Any, name: str
) -> None:
    stop(src, dst, monkeypatch)
    save_file({"w": torch.ones(4)}, dst / name)
    refuse_all(src, dst)
    with pytest.raises(CheckpointError, match=rf"{name}: was not written by swapq"):
        convert(src, dst, overwrite=True)
    (dst / name).unlink()
    convert(src, dst)
    assert swapq.verify(dst, source=src).ok


@pytest.mark.parametrize("stop", UNFINISHED)
@pytest.mark.parametrize("again", [{}, {"overwrite": True}])
def test_an_unfinished_conversion_alone_is_gone_on_with(
    src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch, stop: Any, again: dict[str, bool]
) -> None:
    stop(src, dst, monkeypatch)
    assert convert(src, dst, **again).resumed == (2 if stop is after_two_shards else 0)
    assert swapq.verify(dst, source=src).ok


def test_an_overwrite_of_another_conversion_killed_at_any_removal_is_finished_by_the_same_command(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(src, tmp_path / "fresh", "mxfp8-rl")
    expected = files(tmp_path / "fresh")
    (src / "vocab.txt").write_text("of the first one alone")
    convert(src, tmp_path / "first")
    (src / "vocab.txt").unlink()
    for moment in range(12):
        dst, left = tmp_path / f"dst{moment}", [moment]
        shutil.copytree(tmp_path / "first", dst)

        def this_one(path: Path, *_: Any, dst: Path = dst, left: list[int] = left) -> bool:
            left[0] -= path.parent == dst
            return left[0] < 0

        def act(dst: Path = dst) -> object:
            return convert(src, dst, "mxfp8-rl", overwrite=True)

        try:
            stopped(act, monkeypatch, Path, "unlink", this_one)
        except pytest.fail.Exception:
            break
        act()
        assert files(dst) == expected, moment
    assert moment > 8


EVERYTHING = {
    "model-ema.safetensors",
    "model_masters.safetensors",
    "model.safetensors.sha256",
    "model-00001-of-00002.safetensors.bak",
    "models.safetensors.index.json",
}


@pytest.mark.parametrize("before", ["nothing", "an export", "an export of many shards"])
def test_an_export_removes_no_file_that_only_looks_like_a_shard(tmp_path: Path, before: str) -> None:
    if before != "nothing":
        swapq.export(live(), tmp_path, max_shard_size="5GB" if before == "an export" else 30_000)
    for name in EVERYTHING:
        (tmp_path / name).write_text("mine")
    swapq.export(live(), tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == EVERYTHING | {
        "config.json", "generation_config.json", "model.safetensors", "swapq.json"
    }  # fmt: skip
    assert {(tmp_path / name).read_text() for name in EVERYTHING} == {"mine"}
    assert json.loads((tmp_path / "swapq.json").read_text())["shards"].keys() == {"model.safetensors"}


@pytest.mark.parametrize("gone", ["config.json", "model*.safetensors", "all but the config"])
@pytest.mark.parametrize("size", ["5GB", "200KB"])
def test_an_export_replaces_no_part_of_a_checkpoint(src: Path, tmp_path: Path, gone: str, size: str) -> None:
    dst = tmp_path / "dst"
    qwen3_moe().save_pretrained(dst, max_shard_size=size)
    for path in dst.glob("[!c]*" if gone == "all but the config" else gone):
        path.unlink()
    if gone != "config.json":
        (dst / "pytorch_model.bin").write_bytes(b"pickled")
    refuse_all(src, dst)
    with pytest.raises(CheckpointError, match="swapq did not write"):
        swapq.export(live(), dst)


def test_an_export_replaces_no_masters_that_took_the_place_of_an_exports_shards_without_a_config(
    src: Path, dst: Path
) -> None:
    swapq.export(live(), dst)
    qwen3_moe().save_pretrained(dst)
    (dst / "config.json").unlink()
    refuse_all(src, dst)


@pytest.mark.parametrize("stop", UNFINISHED)
def test_an_export_into_an_unfinished_conversion_is_refused_and_the_conversion_goes_on(
    src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch, stop: Any
) -> None:
    stop(src, dst, monkeypatch)
    before = files(dst)
    with pytest.raises(CheckpointError, match=r"unfinished conversion.*finish it with its own command"):
        swapq.export(live(), dst)
    assert files(dst) == before
    convert(src, dst)
    swapq.export(live(), dst)
    assert swapq.verify(dst).ok


@pytest.mark.parametrize("before", ["nothing", "an export", "a conversion"])
def test_an_export_killed_at_any_rename_or_removal_is_finished_by_the_same_export(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    model = live()
    if before == "an export":
        swapq.export(model, tmp_path / "first", max_shard_size=60_000, layout="modelopt")
    elif before == "a conversion":
        convert(src, tmp_path / "first")
    else:
        (tmp_path / "first").mkdir()
    moments = 0
    for owner, name in ((os, "replace"), (Path, "unlink")):
        for moment in range(100):
            dst, left = tmp_path / f"{name}{moment}", [moment]
            shutil.copytree(tmp_path / "first", dst)

            def this_one(*_: Any, left: list[int] = left) -> bool:
                left[0] -= 1
                return left[0] < 0

            def act(dst: Path = dst) -> None:
                swapq.export(model, dst, max_shard_size=300_000)

            try:
                stopped(act, monkeypatch, owner, name, this_one)
            except pytest.fail.Exception:
                break
            moments += 1
            act()
            assert not [n for n in os.listdir(dst) if n.startswith(".")], (name, moment)
            assert swapq.verify(dst).ok, (name, moment, swapq.verify(dst).problems)
        monkeypatch.undo()
    assert moments > 8


def kill_export_at_its_config(dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(
        lambda: swapq.export(live(), dst),
        monkeypatch,
        writer,
        "publish",
        lambda _, target: target.name == "config.json",
    )


def test_masters_saved_over_a_killed_export_are_never_replaced(
    src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_export_at_its_config(dst, monkeypatch)
    with pytest.raises(CheckpointError, match="unfinished"):
        swapq.plan(dst, "nvfp4-rl")
    qwen3_moe().save_pretrained(dst)
    refuse_all(src, dst)


def test_a_killed_export_is_replaced_by_an_overwrite_with_nothing_left_of_it(
    src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_export_at_its_config(dst, monkeypatch)
    with pytest.raises(CheckpointError, match="unfinished export"):
        convert(src, dst)
    convert(src, dst, overwrite=True)
    assert not [name for name in os.listdir(dst) if name.startswith(".")]
    assert swapq.verify(dst, source=src).ok


def test_an_export_to_a_link_that_leads_nowhere_is_refused_by_the_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"link to .*nowhere, which is not there"):
        swapq.export(live(), tmp_path / "link")


# Two commands at the end of a conversion


def test_scratch_is_removed_under_the_lock_and_may_be_gone(
    src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first command removes its scratch, the same one is done, and another one is refused."""
    real, seen = shutil.rmtree, []

    def meanwhile(path: Path, **options: Any) -> None:
        if not seen:
            seen.append(path)
            seen.append(convert(src, dst).already_done)
            with pytest.raises(CheckpointError, match="another conversion is writing here"):
                convert(src, dst, "mxfp8-rl", overwrite=True)
            real(path)
        real(path, **options)

    monkeypatch.setattr(conversion.shutil, "rmtree", meanwhile)
    assert not convert(src, dst).already_done
    assert seen == [dst / SCRATCH_NAME, True]
    assert not (dst / SCRATCH_NAME).exists()
    assert swapq.verify(dst, source=src).ok


def test_a_run_that_another_one_finished_meanwhile_touches_nothing(
    src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = conversion.resumable, []

    def late(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        if not seen:
            seen.append(True)
            convert(src, dst)
        return found

    monkeypatch.setattr(conversion, "resumable", late)
    assert convert(src, dst).already_done
    assert not (dst / SCRATCH_NAME).exists()


def test_the_note_of_an_earlier_version_is_gone_on_with(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    after_two_shards(src, dst, monkeypatch)
    path = dst / SCRATCH_NAME / PROGRESS_NAME
    said = json.loads(path.read_text())
    path.write_text(json.dumps({key: said[key] for key in ("fingerprint", "source_mtime_ns", "shards")}))
    assert convert(src, dst).resumed == 2
