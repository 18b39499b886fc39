"""What the benchmarks compute from what they measure, and what they say where they cannot run."""

import runpy
import subprocess
import sys

import pytest
import torch

from benchmarks.hopper import needs
from benchmarks.hopper.engine import covered

#: every program, and what it needs
PROGRAMS = {
    "hopper": {"CUDA device", "vLLM"},
    "hopper.engine": {"CUDA device", "vLLM"},
    "hopper.sync": {"vLLM"},
    "hopper.shapes": {"CUDA device"},
    "hopper.linear_shapes": {"CUDA device"},
    "hopper.stored_shapes": {"CUDA device"},
}


def run(program: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """As ``python -m benchmarks.PROGRAM`` does."""
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    monkeypatch.delitem(sys.modules, f"benchmarks.{program}", raising=False)  # runpy warns of what was imported before
    runpy.run_module(f"benchmarks.{program}", run_name="__main__", alter_sys=True)


@pytest.fixture
def nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a CUDA device nor vLLM; Triton is there, whoever has it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(needs, "find_spec", lambda name: None if name == "vllm" else object())


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.usefixtures("nothing_there")
def test_a_program_says_what_is_missing_and_what_to_do(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "shapes" in program:
        pytest.importorskip("triton")
    with pytest.raises(SystemExit) as end:
        run(program, monkeypatch)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert {what for what in ("CUDA device", "vLLM") if what in said} == PROGRAMS[program]
    assert ("run it on a Hopper GPU" in said) == ("CUDA device" in PROGRAMS[program])
    assert ("install one" in said) == ("vLLM" in PROGRAMS[program])


@pytest.mark.usefixtures("nothing_there")
def test_parts_that_do_not_need_vllm_do_not_ask_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("hopper", monkeypatch, "--only", "quantizers", "training", "linear")
    said = capsys.readouterr().err
    assert "CUDA device" in said
    assert "vLLM" not in said


@pytest.mark.parametrize("program", ["hopper.shapes", "hopper.stored_shapes"])
def test_a_program_that_imports_triton_says_that_it_is_missing(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("triton", "swapq.kernels.grouped_gemm", "swapq.kernels.stored_gemm"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as end:
        run(program, monkeypatch)
    assert end.value.code == 2
    assert "has no Triton; run it on a Hopper GPU" in capsys.readouterr().err


def test_the_sync_is_measured_without_a_cuda_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        pass

    def start(command: list[str], **_: object) -> None:
        raise Started(command[-1])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(needs, "find_spec", lambda _: object())
    monkeypatch.setattr(subprocess, "run", start)
    with pytest.raises(Started, match="bf16"):
        run("hopper.sync", monkeypatch)


@pytest.mark.parametrize(
    ("spans", "total"),
    [
        ([], 0),
        ([(0, 5)], 5),
        ([(10, 12), (0, 5)], 7),
        ([(0, 5), (3, 8)], 8),  # a kernel that begins while the one before it ends
        ([(0, 10), (2, 3), (4, 12)], 12),
    ],
)
def test_time_in_which_kernels_overlap_counts_once(spans: list[tuple[int, int]], total: int) -> None:
    assert covered(spans) == total
