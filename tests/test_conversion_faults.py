"""convert_checkpoint: refusals before the first byte, and runs that end in the middle."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import swapq
from swapq.checkpoint import conversion, preflight
from tests.helpers.conversions import convert, every, file_hashes, saved


def untouched(folder: Path) -> bool:
    return not folder.exists() or not any(folder.iterdir())


def test_overlapping_folders_are_refused(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    for dst in (src, src / "inner", tmp_path):
        with pytest.raises(swapq.SwapqError, match="overlap"):
            convert(src, dst)
    (tmp_path / "link").symlink_to(src)
    with pytest.raises(swapq.SwapqError, match="overlap"):
        convert(src, tmp_path / "link")


def test_a_shard_that_is_the_sources_own_file_is_refused(tmp_path: Path) -> None:
    src, dst = saved(tmp_path / "src"), tmp_path / "dst"
    dst.mkdir()
    os.link(src / "model.safetensors", dst / "model.safetensors")
    with pytest.raises(swapq.SwapqError, match="same file"):
        convert(src, dst, overwrite=True)
    assert every(src)


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    src, dst = saved(tmp_path / "src"), tmp_path / "dst"
    dst.mkdir()
    (dst / "notes.txt").write_text("mine")
    with pytest.raises(swapq.SwapqError, match="not empty"):
        convert(src, dst)
    assert [p.name for p in dst.iterdir()] == ["notes.txt"]
    (tmp_path / "file").write_text("")
    with pytest.raises(swapq.SwapqError, match="is a file"):
        convert(src, tmp_path / "file")


def test_too_little_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = saved(tmp_path / "src")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(swapq.SwapqError, match="are needed"):
        convert(src, tmp_path / "dst")
    assert untouched(tmp_path / "dst")


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(swapq.SwapqError, match=r"cannot be (made|written)|are free"):
        convert(saved(tmp_path / "src"), Path("/proc/swapq-cannot-write-here"))


def test_a_truncated_source_shard_is_refused_by_name(tmp_path: Path) -> None:
    src = saved(tmp_path / "src", size="60KB")
    last = sorted(src.glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - 1024)
    with pytest.raises(swapq.SwapqError, match=last.name):
        convert(src, tmp_path / "dst")
    assert untouched(tmp_path / "dst")


def test_a_weight_that_is_not_finite_stops_the_run_by_name_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    tensors = every(src)
    name = "model.layers.0.mlp.experts.5.up_proj.weight"
    tensors[name][3, 4] = torch.nan
    save_file(tensors, src / "model.safetensors", metadata={"format": "pt"})
    for recipe in ("nvfp4-rl", "mxfp8-rl"):
        with pytest.raises(swapq.SwapqError, match=rf"{name}.*\(3, 4\)"):
            convert(src, tmp_path / recipe, recipe, workers=2)
        assert not (tmp_path / recipe / "config.json").exists()
        with pytest.raises((OSError, ValueError), match=r"config\.json"):
            AutoModelForCausalLM.from_pretrained(tmp_path / recipe)


def test_pickles_quantized_sources_and_unknown_layouts_are_refused(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    convert(src, tmp_path / "done")
    with pytest.raises(swapq.SwapqError, match="swapq"):
        convert(tmp_path / "done", tmp_path / "dst")
    with pytest.raises(swapq.SwapqError, match="layout 'gguf'"):
        convert(src, tmp_path / "dst", layout="gguf")
    with pytest.raises(swapq.SwapqError, match="workers is 0"):
        convert(src, tmp_path / "dst", workers=0)
    with pytest.raises(swapq.SwapqError, match="max_shard_size"):
        convert(src, tmp_path / "dst", max_shard_size="five")
    (src / "model.safetensors").rename(src / "pytorch_model.bin")
    with pytest.raises(swapq.SwapqError, match="pickles are not read"):
        convert(src, tmp_path / "dst")
    assert untouched(tmp_path / "dst")


def test_two_runs_into_one_folder_do_not_meet(tmp_path: Path) -> None:
    src, dst = saved(tmp_path / "src"), tmp_path / "dst"
    scratch = dst / ".swapq"
    scratch.mkdir(parents=True)
    with conversion._alone(scratch), pytest.raises(swapq.SwapqError, match="another conversion"):
        convert(src, dst, overwrite=True)


def test_a_disk_that_fills_up_ends_in_one_clear_error_and_can_be_resumed(tmp_path: Path) -> None:
    src, dst = saved(tmp_path / "src"), tmp_path / "dst"
    script = (
        "import resource, signal, swapq\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"
        "try:\n"
        f"    swapq.convert_checkpoint({str(src)!r}, {str(dst)!r}, 'nvfp4-rl', progress=False)\n"
        "except swapq.SwapqError as error:\n"
        "    print(error)\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "File too large" in out
    assert "run the same command again" in out
    assert not (dst / "config.json").exists()
    assert not list(dst.glob("*.safetensors"))
    convert(src, dst)
    convert(src, tmp_path / "whole")
    assert file_hashes(dst) == file_hashes(tmp_path / "whole")


def test_a_script_without_a_main_guard_converts_once(tmp_path: Path) -> None:
    src, dst = saved(tmp_path / "src"), tmp_path / "dst"
    script = f"import swapq\nprint('start')\nswapq.convert_checkpoint({str(src)!r}, {str(dst)!r}, 'nvfp4-rl', workers=2, progress=False)\n"
    (tmp_path / "script.py").write_text(script)
    out = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, check=True
    ).stdout
    assert out.count("start") == 1
    assert (dst / "swapq.json").exists()


@pytest.mark.slow
def test_two_hundred_kills_at_random_moments_leave_nothing_loadable_but_wrong(tmp_path: Path) -> None:
    import random
    import signal
    import time

    src, dst = saved(tmp_path / "src"), tmp_path / "dst"
    (src / "tokenizer.json").write_text("{}")
    convert(src, tmp_path / "whole", max_shard_size=30_000)
    expected = {p.name: p.read_bytes() for p in (tmp_path / "whole").iterdir()}
    started = time.perf_counter()
    convert(src, tmp_path / "timed", max_shard_size=30_000)
    window, finished = 0.6 * (time.perf_counter() - started), 0
    for kill in range(200):
        child = os.fork()
        if child == 0:
            code = 3  # an error: the same command did not go on
            try:
                convert(src, dst, workers=2, max_shard_size=30_000)
                code = 0
            finally:
                os._exit(code)
        time.sleep(random.Random(kill).uniform(0, window))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (0, -signal.SIGKILL)
        found = {p.name: p.read_bytes() for p in dst.iterdir() if p.is_file()} if dst.exists() else {}
        assert all(expected[name] == value for name, value in found.items())
        if "config.json" in found:
            assert found.keys() | {"swapq.json"} == expected.keys()
        window *= (
            0.5 if "swapq.json" in found else 1.1
        )  # a forked child starts slower than its parent: look for the right moments
        if "swapq.json" in found:
            finished += 1
            subprocess.run(["rm", "-r", str(dst)], check=True)
    convert(src, dst, max_shard_size=30_000)
    assert {p.name: p.read_bytes() for p in dst.iterdir()} == expected
    assert 0 < finished < 200
