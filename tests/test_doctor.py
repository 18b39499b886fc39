"""swapq doctor: what it finds, what it advises, and its exit code."""

import json
import tomllib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from swapq import doctor
from swapq.cli import app
from swapq.kernels import dispatch


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.output


def test_a_complete_installation_has_no_gap() -> None:
    code, output = run("--json")
    report = json.loads(output)
    assert code == 0, [f for f in report["findings"] if f["status"] == "gap"]
    assert report["ok"]
    assert {"torch", "vLLM plugin", "nvfp4 on cpu"} <= {f["topic"] for f in report["findings"]}


def test_every_finding_that_is_no_ok_says_what_to_do_or_what_it_means() -> None:
    for finding in doctor.examine():
        assert finding.found
        assert finding.status == "ok" or finding.advice or "CPU" in finding.found


def test_a_missing_package_is_a_gap_with_the_command_that_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "safetensors" else real(name))
    code, output = run()
    assert code == 1
    assert "pip install safetensors" in output


def test_an_old_package_is_a_gap_and_a_new_one_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: {"torch": "2.5.1+cpu", "trl": "9.0"}.get(name, "1.0"))
    found = {f.topic: f for f in doctor._packages()}
    assert found["torch"].status == "gap"
    assert "upgrade" in found["torch"].advice
    assert found["trl"].status == "note"


def test_a_plugin_that_vllm_is_told_to_leave_out_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    (finding,) = doctor._plugin()
    assert finding.status == "gap"
    assert "VLLM_PLUGINS" in finding.advice


def test_arithmetic_that_flushes_subnormals_is_a_gap() -> None:
    """The self-test must notice what fast-math builds do."""
    assert torch.set_flush_denormal(True)
    try:
        found = {f.topic: f.status for f in doctor._numerics()}
    finally:
        torch.set_flush_denormal(False)
    assert found["mxfp8 on cpu"] == found["nvfp4 on cpu"] == "gap"
    assert {f.status for f in doctor._numerics()} == {"ok"}


def test_another_digest_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SELF_TEST", {"nvfp4": "00000000-00000000-00000000"})
    (finding,) = [f for f in doctor._numerics() if f.topic == "nvfp4 on cpu"]
    assert finding.status == "gap"
    assert "do not train or serve" in finding.advice


def test_without_numba_the_doctor_has_a_row_for_it_and_promises_no_compiled_loops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swapq.kernels.cpu.available", lambda: True)
    assert "compiled loops" in {c.work: c for c in dispatch.choices()}["quantize rows and weights"].implementation
    monkeypatch.setattr("swapq.kernels.cpu.available", lambda: False)
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "numba" else real(name))
    found = {f.topic: f for f in doctor.examine()}
    assert found["numba"].status == "note"
    assert "pip install 'swapq[convert]'" in found["numba"].advice
    assert found["kernel: quantize rows and weights, cpu"].found == "torch reference"


def test_what_an_extra_installs_is_advised_as_that_extra() -> None:
    project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["project"]
    for name, extra in doctor._EXTRAS.items():
        assert any(line.startswith(name) for line in project["optional-dependencies"][extra])
