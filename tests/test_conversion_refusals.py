"""`swapq convert` on strange folders, through the command line: exit code 2, one line that names the fault, and nothing written."""

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import swapq
from swapq.checkpoint.record import SCRATCH_NAME
from swapq.cli import app
from tests.helpers.models import qwen3_moe

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine") / "src"
    qwen3_moe().to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def src(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "src"))


def run(*arguments: object) -> tuple[int, str]:
    """Exit code and what stood on stderr."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stderr


def refused(src: Path, dst: Path, *options: object) -> str:
    code, said = run("convert", src, dst, "--recipe", "nvfp4-rl", *options)
    assert code == 2
    assert said.startswith("error: ")
    assert not (dst / "config.json").exists()
    return said


def config(**changes: object) -> Change:
    def change(src: Path) -> None:
        path = src / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def replaced(name: str, make: Callable[[Path], object]) -> Change:
    def change(src: Path) -> None:
        (src / name).unlink()
        make(src / name)

    return change


def with_tensors(**extra: torch.Tensor) -> Change:
    def change(src: Path) -> None:
        save_file(load_file(src / "model.safetensors") | extra, src / "model.safetensors", metadata={"format": "pt"})

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: (s / "model.safetensors").unlink(), "holds no safetensors"),
        (lambda s: os.truncate(s / "model.safetensors", 0), "0 bytes are too few"),
        (replaced("model.safetensors", os.mkfifo), "neither a file nor a link to one"),
        (replaced("model.safetensors", os.mkdir), "model.safetensors"),
        (replaced("config.json", os.mkfifo), "neither a file nor a link to one"),
        (lambda s: (s / "config.json").unlink(), "config.json"),
        (lambda s: (s / "config.json").write_text("[1]"), "expected a JSON object"),
        (config(model_type=None), "model_type ''"),
        (config(model_type=["qwen3_moe"]), "model_type ''"),
        (config(num_hidden_layers=10**9), "1000000000 layers"),
        (config(num_experts=10**9), "1000000000 experts"),
        (config(num_hidden_layers=-1), "num_hidden_layers = -1"),
        (config(quantization_config=5), "expected an object"),
        (config(quantization_config={"quant_method": "gptq", "bits": 4}), "gptq"),
        (with_tensors(**{"model.norm.weight_scale_inv": torch.ones(1, 1)}), "which has no scale"),
        (with_tensors(**{"ghost.weight_scale": torch.ones(1, 1)}), "ghost.weight is missing"),
        (lambda s: os.symlink("/etc/hostname", s / "tokenizer.json"), "outside the folder"),
        (lambda s: ((s / "sub").mkdir(), os.symlink("../../x", s / "sub" / "code.py"), (s.parent / "x").write_text("")), "outside"),
    ],
)  # fmt: skip
def test_a_strange_source_is_refused_before_anything_is_written(
    src: Path, tmp_path: Path, change: Change, says: str
) -> None:
    change(src)
    assert says in refused(src, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--workers", 0), "workers is 0"),
        (("--workers", -1), "workers is -1"),
        (("--workers", 100_000), "from 1 to 256"),
        (("--workers", "two"), "--workers"),
        (("--max-shard-size", 0), "max_shard_size"),
        (("--max-shard-size", "infGB"), "max_shard_size"),
        (("--max-shard-size", "nanGB"), "max_shard_size"),
        (("--max-shard-size", ""), "max_shard_size"),
        (("--layout", "gguf"), "layout 'gguf'"),
        (("--wrokers", 2), "--wrokers"),
    ],
)
def test_a_strange_option_is_refused(src: Path, tmp_path: Path, options: tuple[object, ...], says: str) -> None:
    assert says in refused(src, tmp_path / "dst", *options)
    assert not (tmp_path / "dst").exists()


def test_a_shard_size_may_be_a_number_of_bytes(src: Path, tmp_path: Path) -> None:
    assert run("convert", src, tmp_path / "dst", "-r", "nvfp4-rl", "--max-shard-size", 30_000)[0] == 0
    assert len(list((tmp_path / "dst").glob("*.safetensors"))) > 3


@pytest.mark.parametrize(
    "dst", ["src", "src/inner", ".", "src/../src/y", "link/z", "file", "file/inner", "x" * 300, "dangling"]
)
def test_a_destination_that_cannot_be_is_refused_and_the_source_is_not_touched(
    src: Path, tmp_path: Path, dst: str
) -> None:
    (tmp_path / "link").symlink_to(src)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "deep")
    (tmp_path / "file").write_text("")
    before = sorted(p.name for p in src.rglob("*"))
    assert run("convert", src, tmp_path / dst, "-r", "nvfp4-rl")[0] == 2
    assert sorted(p.name for p in src.rglob("*")) == before


def test_a_scratch_folder_that_is_a_link_is_not_followed(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    dst.mkdir()
    (dst / SCRATCH_NAME).symlink_to(src)
    before = sorted(p.name for p in src.iterdir())
    for options in ((), ("--overwrite",)):
        assert SCRATCH_NAME in refused(src, dst, *options)
    assert sorted(p.name for p in src.iterdir()) == before


def test_names_with_spaces_and_other_alphabets_work(src: Path, tmp_path: Path) -> None:
    folder, dst = tmp_path / "mo del é 漢", tmp_path / "de st\nß"
    src.rename(folder)
    (folder / "Токенизатор 1.json").write_text("{}")
    assert run("convert", folder, dst, "-r", "nvfp4-rl")[0] == 0
    assert (dst / "Токенизатор 1.json").read_text() == "{}"
    assert run("verify", dst, "--source", folder)[0] == 0


def test_shards_may_be_links_and_so_may_the_rest_inside_the_folder_or_the_hubs_cache(src: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--me--it"
    snapshot, blobs = cache / "snapshots" / "abc", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (src / "tokenizer.json").write_text("{}")
    for i, path in enumerate(sorted(src.iterdir())):
        path.rename(blobs / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    (snapshot / "again.json").symlink_to("tokenizer.json")
    assert run("convert", snapshot, tmp_path / "dst", "-r", "nvfp4-rl")[0] == 0
    assert (tmp_path / "dst" / "tokenizer.json").read_text() == "{}"
    assert not any(p.is_symlink() for p in (tmp_path / "dst").iterdir())


def test_what_is_not_copied_is_named(src: Path, tmp_path: Path) -> None:
    (src / "consolidated.pth").write_bytes(b"")
    (src / "linked").symlink_to(tmp_path)
    os.mkfifo(src / "pipe.json")
    tensors = load_file(src / "model.safetensors")
    save_file(tensors, src / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    (src / "model.safetensors").rename(src / "consolidated.safetensors")
    weight_map = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    (src / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    code, said = run("convert", src, tmp_path / "dst", "-r", "nvfp4-rl")
    assert code == 0
    for name in ("consolidated.pth", "linked", "pipe.json", "consolidated.safetensors"):
        assert f"note: {name} was not copied" in said


def test_an_unreadable_file_is_refused_before_anything_is_written(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (src / "tokenizer.json").write_text("{}")
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "tokenizer.json" and real(path, mode))
    assert "tokenizer.json: cannot be read" in refused(src, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_a_read_only_destination_is_refused_before_anything_is_written(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dst").mkdir()
    if os.geteuid() == 0:  # permissions do not bind root
        real = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and real(path, mode))
    else:
        (tmp_path / "dst").chmod(0o555)
    assert "cannot be written by this user" in refused(src, tmp_path / "dst")
    assert not list((tmp_path / "dst").iterdir())


@pytest.mark.parametrize("moment", range(0, 12, 3))
def test_a_destination_that_becomes_read_only_ends_in_an_error_and_can_be_resumed(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    dst, real, left = tmp_path / "dst", os.replace, moment
    (src / "tokenizer.json").write_text("{}")

    def replace(a: Any, b: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(b))
        real(a, b)

    monkeypatch.setattr(os, "replace", replace)
    assert "Read-only file system" in refused(src, dst, "--max-shard-size", 30_000)
    monkeypatch.setattr(os, "replace", real)
    assert run("convert", src, dst, "-r", "nvfp4-rl", "--max-shard-size", 30_000)[0] == 0
    assert run("verify", dst, "--source", src)[0] == 0


def test_a_scale_of_a_block_fp8_source_that_is_no_number_a_tile_is_refused(src: Path, tmp_path: Path) -> None:
    tensors = load_file(src / "model.safetensors")
    config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})(src)
    for scale, ok in (
        (torch.full((1, 1), 0.5), True),
        (torch.full((1, 1), 0.5).to(torch.bfloat16), True),
        (torch.full((1, 1), 126, dtype=torch.uint8), False),  # an E8M0 byte, or the number 126: nobody says which
        (torch.full((1, 1), 1, dtype=torch.int32), False),
        (torch.full((2, 2), 0.5), False),
        (torch.full((1,), 0.5), False),
    ):
        stored = {}
        for name, t in tensors.items():
            if name.endswith("_proj.weight"):
                stored |= {name: t.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.clone()}
            else:
                stored[name] = t
        save_file(stored, src / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(tmp_path / "dst", ignore_errors=True)
        if ok:
            assert run("convert", src, tmp_path / "dst", "-r", "nvfp4-rl")[0] == 0
        else:
            assert "weight_scale_inv" in refused(src, tmp_path / "dst")


def test_too_little_memory_is_said_with_the_number(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") == torch.uint8 and isinstance(shape[0], int) and shape[0] > 1000:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(*shape, **options)

    monkeypatch.setattr("swapq.checkpoint.arena.torch.empty", empty)
    assert "MB of memory for one worker cannot be had" in refused(src, tmp_path / "dst")


def test_the_compiled_loops_work_where_nothing_can_be_cached(tmp_path: Path) -> None:
    """An unwritable home and a read-only package."""
    import subprocess

    pytest.importorskip("numba")
    script = (
        "import numba.core.caching as caching, torch\n"
        "def no(self): raise OSError('read-only')\n"
        "for locator in caching.CacheImpl._locator_classes: locator.ensure_cache_path = no\n"
        "from swapq.kernels import cpu\n"
        "print(cpu.compiled() is not None, cpu.quantize_matrix(torch.ones(1, 32, dtype=torch.bfloat16), 'nvfp4').codes.tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split(" ", 1) == ["True", f"{[[0x77] * 16]}\n"]


@pytest.mark.parametrize("repository", ["a b/c", "a/b/c", "..", "", "x" * 200, "../x"])
def test_a_repository_that_cannot_be_is_refused_before_the_conversion(
    src: Path, tmp_path: Path, repository: str
) -> None:
    assert "is no repository on the Hub" in refused(src, tmp_path / "dst", "--push-to-hub", repository)
    assert not (tmp_path / "dst").exists()
    said = refused(src, tmp_path / "dst", "--push-to-hub", "me/it", "--base-model", "./folder")
    assert "base_model is './folder'" in said
    assert not (tmp_path / "dst").exists()


def test_a_hub_that_cannot_be_reached_is_an_error_of_ours_and_the_folder_stays(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import HfApi

    monkeypatch.setattr(
        "swapq.checkpoint.upload.HfApi", lambda token: HfApi(endpoint="http://127.0.0.1:9", token=token)
    )
    code, said = run("convert", src, tmp_path / "dst", "-r", "nvfp4-rl", "--push-to-hub", "me/it")
    assert code == 2
    assert "me/it: the Hub refused or cannot be reached" in said
    assert swapq.verify(tmp_path / "dst").ok


def test_exit_codes_are_0_1_and_2(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    assert run("convert", src, dst, "-r", "nvfp4-rl")[0] == 0
    assert run("convert", src, dst, "-r", "nvfp4-rl")[0] == 0
    assert run("convert", src, dst, "-r", "mxfp8-rl")[0] == 2
    assert run("verify", dst)[0] == 0
    shard = dst / "model.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    assert run("verify", dst)[0] == 1
    assert run("inspect", dst)[0] == 2
    assert swapq.verify(dst).problems


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_recipe_that_quantizes_nothing_is_refused_in_layouts_without_words_for_it(
    src: Path, tmp_path: Path, layout: str
) -> None:
    code, said = run("convert", src, tmp_path / "dst", "--recipe", "bf16", "--layout", layout)
    assert code == 2
    assert f"layout '{layout}' has no words for recipe 'bf16', which quantizes nothing" in said
    assert not (tmp_path / "dst").exists()
    with pytest.raises(swapq.SwapqError, match="quantizes nothing"):
        swapq.export(swapq.convert(qwen3_moe(), "bf16"), tmp_path / "dst", layout=layout)


def test_a_base_model_without_a_card_to_put_it_in_is_refused(src: Path, tmp_path: Path) -> None:
    assert "--base-model is for the card" in refused(src, tmp_path / "dst", "--base-model", "owner/name")


def stopped(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> tuple[int, str]:
    """Ctrl-C when the file ``at`` is published."""
    real = os.replace

    def replace(a: Any, b: Any) -> None:
        if Path(b).name == at:
            raise KeyboardInterrupt
        real(a, b)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        return run("convert", src, dst, "-r", "nvfp4-rl", "--max-shard-size", 30_000)


@pytest.mark.parametrize("at", ["model-00003-of-00005.safetensors", "config.json", "swapq.json"])
def test_ctrl_c_says_in_one_line_that_the_same_command_goes_on(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    dst = tmp_path / "dst"
    code, said = stopped(src, dst, monkeypatch, at)
    assert code == 130
    assert said == f"stopped: {dst} is unfinished; the same command goes on from where it stopped\n"
    assert run("convert", src, dst, "-r", "nvfp4-rl", "--max-shard-size", 30_000)[0] == 0
    assert run("verify", dst, "--source", src)[0] == 0


def test_ctrl_c_before_anything_is_written_says_so_little(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("swapq.checkpoint.conversion.plan", stop)
    assert run("convert", src, tmp_path / "dst", "-r", "nvfp4-rl") == (130, "stopped\n")
    assert not (tmp_path / "dst").exists()


def test_every_command_calls_an_unfinished_conversion_by_its_name(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst = tmp_path / "dst"
    assert stopped(src, dst, monkeypatch, "model-00003-of-00005.safetensors")[0] == 130
    named = f"{dst}: is an unfinished conversion"
    for command in (
        ("inspect", dst),
        ("plan", dst, "-r", "nvfp4-rl"),
        ("convert", dst, tmp_path / "other", "-r", "nvfp4-rl"),
        ("card", dst),
        ("verify", src, "--source", dst),
    ):
        code, said = run(*command)
        assert code == 2, command
        assert said.startswith(f"error: {named}"), said
        assert "run its command again" in said
    (problem,) = swapq.verify(dst).problems
    assert problem.startswith(named)
    assert run("verify", dst)[0] == 1


def test_a_conversion_without_numba_says_that_it_is_slow(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("convert", src, tmp_path / "fast", "-r", "nvfp4-rl") == (0, "")
    monkeypatch.setattr("swapq.kernels.cpu.available", lambda: False)
    code, said = run("convert", src, tmp_path / "slow", "-r", "nvfp4-rl")
    assert code == 0
    assert said.startswith("note: numba is not installed")
    assert "pip install 'swapq[convert]'" in said
    assert len(said.splitlines()) == 1
    assert run("convert", src, tmp_path / "slow", "-r", "nvfp4-rl") == (0, "")
    assert run("convert", src, tmp_path / "copied", "-r", "bf16") == (0, "")
