"""The ablation's arithmetic and its page, on made-up runs; the schedule keeps what is finished."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.examples import import_example

configuration = import_example("comparison.configuration")
page = import_example("comparison.page")
schedule = import_example("comparison.schedule")
summary = import_example("comparison.summary")


def _run(label: str, seed: int, exact: list[float], *, mismatch: float = 0.01, norm: float = 1.0) -> dict[str, Any]:
    rows = [
        {
            "step": step,
            "exact": value,
            "reward": value,
            "grad_norm": norm,
            "mismatch_mean": mismatch,
            "mismatch_max": 10 * mismatch,
            "mismatch_k3": mismatch**2,
            "ess": 0.999,
            "reference_k1": 0.0,
            "reference_k3": 0.001 * step,
            "seconds": {"rollout": 0.1, "sync": 0.2, "reference": 0.05, "training": 0.3, "step": 0.65},
        }
        for step, value in enumerate(exact, start=1)
    ]
    return {
        "label": label,
        "policies": "one policy",
        "seed": seed,
        "steps": len(exact),
        "rows": rows,
        "sync_bytes": 2**20,
        "saved_for_backward": 2**21,
        "peak_bytes": 2**30,
    }


def _rising(top: float, steps: int = 20) -> list[float]:
    return [0.1 + (top - 0.1) * step / steps for step in range(1, steps + 1)]


def _groups(*runs: dict[str, Any]) -> dict[str, Any]:
    return {group.label: group for group in summary.groups(runs)}


def test_a_curve_between_two_control_seeds_is_inside_their_range() -> None:
    found = _groups(
        _run("bf16", 0, _rising(0.3)),
        _run("bf16", 1, _rising(0.5)),
        *(_run("int4-qat", s, _rising(0.4)) for s in (0, 1)),
    )
    verdict = summary.spread(found["int4-qat"], found["bf16"])
    assert verdict.final_inside
    assert verdict.steps_inside == 1.0


def test_a_curve_below_every_control_seed_is_outside() -> None:
    found = _groups(
        _run("bf16", 0, _rising(0.4)),
        _run("bf16", 1, _rising(0.5)),
        *(_run("int4-qat", s, _rising(0.2)) for s in (0, 1)),
    )
    verdict = summary.spread(found["int4-qat"], found["bf16"])
    assert not verdict.final_inside
    assert verdict.steps_inside == 0.0
    assert verdict.difference < -0.1


def test_the_difference_is_taken_seed_by_seed() -> None:
    found = _groups(
        *(_run("bf16", seed, [value] * 20) for seed, value in ((0, 0.2), (1, 0.6))),
        *(_run("int4-qat", seed, [value] * 20) for seed, value in ((0, 0.3), (1, 0.7))),
    )
    verdict = summary.spread(found["int4-qat"], found["bf16"])
    assert verdict.difference == pytest.approx(0.1)
    assert verdict.deviation == pytest.approx(0.0, abs=1e-9)


def test_runs_without_a_common_seed_are_not_compared() -> None:
    found = _groups(_run("bf16", 0, _rising(0.4)), _run("int4-qat", 1, _rising(0.4)))
    with pytest.raises(ValueError, match="no seed in common"):
        summary.spread(found["int4-qat"], found["bf16"])


def test_the_larger_mismatch_is_seen_at_every_step() -> None:
    found = _groups(
        _run("fp8-rollout", 0, _rising(0.4), mismatch=0.02), _run("fp8-block-rl", 0, _rising(0.4), mismatch=0.01)
    )
    figures = summary.larger_mismatch(found["fp8-rollout"], found["fp8-block-rl"])
    assert figures["share"] == 1.0
    assert figures["ratio"] == pytest.approx(2.0)


def test_gradient_norms_are_paired_by_seed_and_step() -> None:
    high, low = _run("mxfp8-high_precision", 0, _rising(0.4), norm=3.0), _run("mxfp8-dequantized", 0, _rising(0.4))
    found = _groups(high, low)
    assert summary.paired_norms(found["mxfp8-high_precision"], found["mxfp8-dequantized"]) == pytest.approx(3.0)


def test_the_page_holds_its_figures_and_every_configuration(tmp_path: Path) -> None:
    labels = [one.label for one in configuration.CONFIGURATIONS]
    runs = [_run(label, seed, _rising(0.4)) for label in labels for seed in (0, 1)]
    cells = [
        {
            "seed": 0,
            "recipe": "nvfp4-rl",
            "last": last,
            "first": 0,
            "shared": "bf16",
            "kl": 1e-3,
            "bytes": 1,
            "bytes_bf16": 2,
        }
        for last in (0, 0.15, 0.3)
    ]
    text = page.write_page(runs, tmp_path, precision=cells, command="python <x>").read_text(encoding="utf-8")
    assert all(label in text for label in labels)
    assert text.count("data:image/png;base64,") == 5
    assert "http" not in text
    assert "&lt;x&gt;" in text
    tables = json.loads((tmp_path / "tables.json").read_text(encoding="utf-8"))
    assert len(tables["Learning"]["rows"]) == len(labels)


def test_a_run_of_two_steps_has_a_page_too(tmp_path: Path) -> None:
    assert page.write_page([_run("int4-qat", 0, [0.1, 0.2])], tmp_path).is_file()


def test_a_finished_run_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, int]] = []

    def start(one: Any, seed: int, steps: int, path: Path, cache: Path) -> int:
        started.append((one.label, seed))
        path.write_text(json.dumps(_run(one.label, seed, _rising(0.4, steps))), encoding="utf-8")
        return 0

    monkeypatch.setattr(schedule, "_in_own_process", start)
    plan = schedule.Schedule(configuration.named(["bf16", "int4-qat"]), (0, 1), 5, tmp_path, tmp_path)
    (tmp_path / "int4-qat-seed0-steps5.json").write_text(json.dumps(_run("int4-qat", 0, [0.1] * 5)), encoding="utf-8")
    assert plan.carry_out() == []
    assert started == [("bf16", 0), ("bf16", 1), ("int4-qat", 1)]
    assert len(schedule.finished(tmp_path, 5)) == 4


def test_a_failed_run_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(one: Any, seed: int, steps: int, path: Path, cache: Path) -> int:
        return 1 if one.label == "bf16" else 0

    monkeypatch.setattr(schedule, "_in_own_process", start)
    plan = schedule.Schedule(configuration.named(["bf16", "int4-qat"]), (0,), 5, tmp_path, tmp_path)
    assert plan.carry_out() == ["bf16-seed0-steps5"]


def test_an_unknown_configuration_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"unknown configuration fp9; there are bf16, fp8-block-rl"):
        configuration.named(["fp9"])
