"""The ablation's arithmetic and its page, on made-up runs; the schedule keeps what is finished."""

import json
import multiprocessing
import os
import time
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


class _Ended:
    """What a schedule sees of a process that has ended."""

    def __init__(self, code: int) -> None:
        self.sentinel, other = os.pipe()
        os.close(other)
        self.exitcode = code

    def join(self) -> None:
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1


class _Starts:
    """Starts nothing: finishes every run at once, but for those of the labels that fail."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.runs: list[tuple[str, int]] = []
        self.slots: list[int] = []
        self.logs: list[Path] = []

    def __call__(self, target: Any, log: Path, *arguments: Any) -> _Ended:
        self.logs.append(log)
        if target is schedule._prepare:
            return _Ended(1 if "start" in self.failing else 0)
        order, slot = arguments
        label = order.configuration.label
        self.runs.append((label, order.seed))
        self.slots.append(slot)
        if label in self.failing:
            log.write_text("first line\nCUDA out of memory", encoding="utf-8")
            return _Ended(1)
        order.path.write_text(json.dumps(_run(label, order.seed, _rising(0.4, order.steps))), encoding="utf-8")
        return _Ended(0)


def test_a_finished_run_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = _Starts()
    monkeypatch.setattr(schedule, "_start", starts)
    plan = schedule.Schedule(configuration.named(["bf16", "int4-qat"]), (0, 1), 5, tmp_path, tmp_path)
    (tmp_path / "int4-qat-seed0-steps5.json").write_text(json.dumps(_run("int4-qat", 0, [0.1] * 5)), encoding="utf-8")
    assert plan.carry_out() == []
    assert starts.runs == [("bf16", 0), ("bf16", 1), ("int4-qat", 1)]
    assert len(schedule.finished(tmp_path, 5)) == 4
    assert plan.carry_out() == []
    assert len(starts.runs) == 3


@pytest.mark.parametrize("parallel", [1, 3])
def test_a_failed_run_is_named_with_its_last_lines_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], parallel: int
) -> None:
    starts = _Starts("bf16")
    monkeypatch.setattr(schedule, "_start", starts)
    labels = ["bf16", "int4-qat", "fp8-rollout"]
    plan = schedule.Schedule(configuration.named(labels), (0, 1), 5, tmp_path, tmp_path, parallel=parallel)
    assert sorted(plan.carry_out()) == ["bf16-seed0-steps5", "bf16-seed1-steps5"]
    assert len(starts.runs) == 6
    assert capsys.readouterr().out.count("CUDA out of memory") == 2
    assert len(schedule.finished(tmp_path, 5)) == 4


def test_runs_at_the_same_time_have_slots_and_logs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = _Starts()
    monkeypatch.setattr(schedule, "_start", starts)
    plan = schedule.Schedule(configuration.CONFIGURATIONS, (0,), 5, tmp_path, tmp_path, parallel=3)
    assert plan.carry_out() == []
    assert starts.slots[:3] == [0, 1, 2]
    assert set(starts.slots) == {0, 1, 2}
    assert len(set(starts.logs)) == 1 + len(configuration.CONFIGURATIONS)


def test_without_a_supervised_start_no_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = _Starts("start")
    monkeypatch.setattr(schedule, "_start", starts)
    plan = schedule.Schedule(configuration.named(["bf16"]), (0,), 5, tmp_path, tmp_path)
    assert plan.carry_out() == ["bf16-seed0-steps5"]
    assert starts.runs == []


def test_an_unknown_configuration_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"unknown configuration fp9; there are bf16, fp8-block-rl"):
        configuration.named(["fp9"])


def test_every_label_is_one_configuration_with_a_colour() -> None:
    figures = import_example("comparison.figures")
    labels = [one.label for one in configuration.ALL]
    assert len(labels) == len(set(labels)) == len(set(figures._COLOURS))


def test_the_outcome_is_one_line_a_configuration_and_says_who_shared_the_device() -> None:
    outcome = import_example("comparison.outcome")
    alone = [_run("bf16", 0, [0.1] * 5 + [0.5] * 5), _run("int4-qat", 0, [0.2] * 10, mismatch=0.0123, norm=2.5)]
    head, first, second = outcome.outcome(alone).splitlines()
    assert "exact" in head
    assert first.split()[:4] == ["bf16", "1", "0.100", "0.500"]
    assert {"0.01230", "2.500", "1,024"} < set(second.split())
    shared = [{**run, "sharing": 4} for run in alone]
    assert "Up to 4 runs shared one device" in outcome.outcome(shared)
    assert "Up to 4 runs shared one device" in json.dumps([table.note for table in page.tables(shared)])


def test_the_page_names_task_and_device(tmp_path: Path) -> None:
    run = {**_run("bf16", 0, _rising(0.4)), "text": "exercises", "device": "NVIDIA H200"}
    text = page.write_page([run], tmp_path).read_text(encoding="utf-8")
    assert "GRPO on exercises, on NVIDIA H200" in text
    assert "tiny model on a CPU" not in text


def test_runs_of_other_precision_are_refused_where_they_would_not_differ(capsys: pytest.CaptureFixture[str]) -> None:
    ablation = import_example("ablation")
    with pytest.raises(SystemExit):
        ablation.parse_arguments(["--precision-runs"])
    assert "use --task reasoning" in capsys.readouterr().err
    options = ablation.parse_arguments(["--precision-runs", "--task", "reasoning"])
    labels = {one.label for one in options.configurations}
    assert {"bf16", "nvfp4-dequantized", "nvfp4-last-0", "nvfp4-last-0.3", "nvfp4-first-bf16"} < labels
    assert options.size == "200m"
    assert options.output.name == "ablation-reasoning-200m"


def test_without_the_package_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ablation = import_example("ablation")
    monkeypatch.setattr(ablation, "PACKAGE", "a_package_that_is_not_there")
    monkeypatch.setattr("sys.argv", ["ablation.py", "--task", "reasoning", "--output", str(tmp_path)])
    assert ablation.main() == 2
    written = capsys.readouterr().err
    assert written.count("\n") == 1
    assert "pip install 'swapq[gym]'" in written


def _write_and_wait(pid_file: Path) -> None:
    print("from Python", flush=True)
    os.write(2, b"from a library\n")
    pid_file.write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(600)


def _start_and_die(log: Path, pid_file: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=schedule._logged, args=(log, _write_and_wait, pid_file)
    )
    process.start()
    while not pid_file.exists() or not pid_file.read_text(encoding="utf-8"):
        time.sleep(0.05)
    os._exit(9)


def test_a_run_logs_all_it_writes_and_ends_with_the_schedule(tmp_path: Path) -> None:
    log, pid_file = tmp_path / "run.log", tmp_path / "pid"
    parent = multiprocessing.get_context("spawn").Process(target=_start_and_die, args=(log, pid_file))
    parent.start()
    parent.join(120)
    assert parent.exitcode == 9
    pid = int(pid_file.read_text(encoding="utf-8"))
    deadline = time.monotonic() + 30
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)
    assert log.read_text(encoding="utf-8").splitlines()[-2:] == ["from Python", "from a library"]


def _alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"


def test_the_usual_command_line_is_the_main_job() -> None:
    options = import_example("ablation").parse_arguments([])
    assert (options.task, options.size, options.parallel, options.eager) == ("arithmetic", "tiny", 1, False)
    assert options.configurations == configuration.CONFIGURATIONS
    assert (options.output.name, options.cache.name) == ("ablation", "arithmetic")
