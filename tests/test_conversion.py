"""convert_checkpoint: the same bytes as the live path, whatever the shards and workers; refusals before the first byte."""

import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import swapq
from swapq.checkpoint import conversion, preflight
from swapq.checkpoint.card import model_card
from tests.helpers.models import FAMILIES, prompts
from tests.helpers.recipes import SERVED, tiny

EXPORTED = [f for f in FAMILIES if f != "gpt_oss"]


def saved(folder: Path, family: str = "qwen3_moe", dtype: torch.dtype = torch.bfloat16, size: str = "5GB") -> Path:
    FAMILIES[family]().to(dtype).save_pretrained(folder, max_shard_size=size)
    return folder


def convert(src: Path, dst: Path, recipe: object = "nvfp4-rl", **options: object) -> conversion.Conversion:
    return swapq.convert_checkpoint(src, dst, recipe, progress=False, **options)  # type: ignore[arg-type]


def every(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    def raw(t: Tensor) -> Tensor:
        return t.reshape(-1).view(torch.uint8) if t.numel() else t

    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and torch.equal(raw(a[k]), raw(b[k])) for k in a
    )


def file_hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.safetensors")}


def rewrite(folder: Path, shards: list[dict[str, Tensor]]) -> None:
    """Store tensors in shards of the caller's choosing."""
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    weight_map = {k: n for n, s in zip(names, shards, strict=True) for k in s}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# The same bytes


@pytest.mark.parametrize("recipe", ["bf16", *SERVED])
@pytest.mark.parametrize("family", EXPORTED)
def test_a_folder_and_a_live_model_become_the_same_tensors(tmp_path: Path, family: str, recipe: str) -> None:
    src = tmp_path / "src"
    AutoModelForCausalLM.from_pretrained(saved(tmp_path / "raw", family)).save_pretrained(
        src
    )  # FP32 where the family has it
    convert(src, tmp_path / "a", tiny(recipe))
    live = swapq.convert(AutoModelForCausalLM.from_pretrained(src), tiny(recipe))
    swapq.export(live, tmp_path / "b")
    assert same(every(tmp_path / "a"), every(tmp_path / "b"))
    listed = [json.loads((tmp_path / d / "config.json").read_text())["quantization_config"] for d in "ab"]
    assert listed[0] == listed[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    if not swapq.recipe_of(live).matched:  # what is loaded is the rollout's policy, what trains is BF16
        live = swapq.convert(AutoModelForCausalLM.from_pretrained(src), tiny(recipe), trainable=False)
    with torch.no_grad():
        assert torch.equal(loaded(prompts()).logits, live(prompts()).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_masters_of_other_dtypes_become_bf16_first_and_the_rest_keeps_its_dtype(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    src = saved(tmp_path / "src", dtype=dtype)
    convert(src, tmp_path / "dst", "nvfp4-rl", workers=2)
    before, after = every(src), every(tmp_path / "dst")
    name = "model.layers.0.mlp.experts.2.down_proj.weight"
    assert torch.equal(after[name], swapq.quantize(before[name].to(torch.bfloat16), "nvfp4").codes)
    kept = [k for k in before if k in after and ".experts." not in k]
    assert kept
    assert same({k: before[k] for k in kept}, {k: after[k] for k in kept})


def test_workers_change_nothing(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    results = []
    for workers in (1, 2, 4):
        convert(src, tmp_path / str(workers), workers=workers, max_shard_size=30_000)
        results.append(file_hashes(tmp_path / str(workers)))
    assert len(results[0]) > 3
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("size", [1, 10_000, 100_000, "5GB"])
def test_output_shards_of_any_size_hold_the_same_tensors(tmp_path: Path, size: object) -> None:
    src = saved(tmp_path / "src")
    convert(src, tmp_path / "whole")
    convert(src, tmp_path / "dst", max_shard_size=size)
    assert same(every(tmp_path / "dst"), every(tmp_path / "whole"))
    assert swapq.digest(tmp_path / "dst") == swapq.digest(tmp_path / "whole")


def test_a_gate_and_its_up_in_different_source_shards_share_their_scale(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    convert(src, tmp_path / "whole")
    tensors = every(src)
    gates = {k: v for k, v in tensors.items() if ".gate_proj." in k}
    rewrite(src, [gates, {k: v for k, v in tensors.items() if k not in gates}])
    convert(src, tmp_path / "split", workers=2)
    assert same(every(tmp_path / "split"), every(tmp_path / "whole"))


def test_a_pair_of_very_different_halves_shares_one_scale(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    tensors = every(src)
    for name in tensors:
        if ".up_proj." in name:
            tensors[name] = tensors[name] * 8
    save_file(tensors, src / "model.safetensors", metadata={"format": "pt"})
    convert(src, tmp_path / "dst")
    after = every(tmp_path / "dst")
    stem = "model.layers.0.mlp.experts.1"
    assert torch.equal(after[f"{stem}.gate_proj.weight_scale_2"], after[f"{stem}.up_proj.weight_scale_2"])
    expected = swapq.quantize(
        tensors[f"{stem}.gate_proj.weight"], "nvfp4", amax=tensors[f"{stem}.up_proj.weight"].abs().amax().float()
    )
    assert torch.equal(after[f"{stem}.gate_proj.weight"], expected.codes)


def block_fp8(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """A source whose projections are FP8 in blocks, and the BF16 tensors that it means."""
    src = saved(folder, "deepseek_v3")
    config = json.loads((src / "config.json").read_text())
    expected: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    for name, t in every(src).items():
        if t.dim() == 2 and name.endswith("_proj.weight") and "layers" in name:
            scale = torch.full((-(-t.shape[0] // 128), -(-t.shape[1] // 128)), 0.0371)
            q = (t.float() / 0.0371 / 2).to(torch.float8_e4m3fn)
            stored |= {name: q, name + "_scale_inv": scale}
            expected[name] = (q.float() * torch.tensor(0.0371)).to(torch.bfloat16)
        else:
            stored[name] = expected[name] = t
    save_file(stored, src / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (src / "config.json").write_text(json.dumps(config))
    return src, expected


def test_a_block_fp8_source_is_dequantized_exactly_and_then_converted(tmp_path: Path) -> None:
    src, expected = block_fp8(tmp_path / "src")
    convert(src, tmp_path / "dst", "nvfp4-rl", workers=2)
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(expected, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((src / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    convert(plain, tmp_path / "from-plain", "nvfp4-rl")
    assert same(every(tmp_path / "dst"), every(tmp_path / "from-plain"))
    assert not any("scale_inv" in k for k in every(tmp_path / "dst"))
    said = model_card(tmp_path / "dst")
    count = sum(name.endswith("_scale_inv") for name in every(src)) - len(swapq.plan(src, "nvfp4-rl").quantized)
    assert f"but for {count} weights that are FP8 in the source" in said
    assert "FP8 in the source" not in model_card(tmp_path / "from-plain")


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.experts.0.up_proj.weight"]
)
def test_an_fp8_weight_that_is_not_finite_is_refused_by_name_also_where_it_stays_unquantized(
    tmp_path: Path, name: str
) -> None:
    src, _ = block_fp8(tmp_path / "src")
    tensors = every(src)
    tensors[name + "_scale_inv"].fill_(torch.nan)
    save_file(tensors, src / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(swapq.SwapqError, match=f"{name}: .* are not finite"):
        convert(src, tmp_path / "dst", "nvfp4-rl")
    assert not (tmp_path / "dst" / "config.json").exists()


def test_an_expert_of_zeros_and_one_of_tiny_values_come_out_finite(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    tensors = every(src)
    for name in tensors:
        if ".experts.1." in name:
            tensors[name] = torch.zeros_like(tensors[name])
        if ".experts.2." in name:
            tensors[name] = (tensors[name].float() * 1e-30).to(torch.bfloat16)
    save_file(tensors, src / "model.safetensors", metadata={"format": "pt"})
    for recipe in ("nvfp4-rl", "mxfp8-rl"):
        convert(src, tmp_path / recipe, recipe)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / recipe)
        q = model.model.layers[0].mlp.experts.quantized()["down_proj"].dequantize(torch.float32)
        assert q.isfinite().all()
        assert q[1].count_nonzero() == 0
        assert q[2].count_nonzero() > 0


def test_underflowed_blocks_are_counted(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    tensors = every(src)
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    tensors[name] = torch.full_like(tensors[name], 1e-9)
    tensors[name][0, 0] = 100.0
    save_file(tensors, src / "model.safetensors", metadata={"format": "pt"})
    done = convert(src, tmp_path / "dst")
    blocks = tensors[name].numel() // 16
    assert done.underflowed_blocks == blocks - 1
    assert json.loads((tmp_path / "dst" / "swapq.json").read_text())["underflowed_blocks"] == blocks - 1


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


# Refusals, before the first byte


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
