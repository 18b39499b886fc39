"""The reasoning job: its prompts and scores come from the package, its model fits every recipe, its configurations say what they mean."""

import dataclasses
import json
import random
from typing import Any

import pytest
import torch

import swapq
from swapq.formats import get
from tests.helpers.examples import import_example

pytest.importorskip("reasoning_gym", reason="the extra `gym` is not installed")

job = import_example("comparison.job")
configuration = import_example("comparison.configuration")
model = import_example("reasoning.model")
task = import_example("reasoning.task")
warmup = import_example("arithmetic.warmup")


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others() -> None:
    first, again, other = (task.prompts(64, seed) for seed in (3, 3, 4))
    assert first.to_dict() == again.to_dict()
    assert len(set(first["prompt"]) & set(other["prompt"])) < 16


def test_the_same_generator_gives_the_same_supervised_batch() -> None:
    one, other = (task.supervised_batch(random.Random(5), 32, 0.5) for _ in range(2))
    assert one == other


def test_every_exercise_appears() -> None:
    names = {entry["metadata"]["source_dataset"] for entry in task.entries(100, 0)}
    assert names == {exercise.name for exercise in task.EXERCISES}


def test_prompts_and_answers_keep_to_their_limits_in_tokens() -> None:
    tokenizer = model.build_tokenizer()
    rows = task.prompts(400, 0)
    assert max(len(ids) for ids in tokenizer(list(rows["prompt"]))["input_ids"]) <= 96
    assert (
        max(len(ids) for ids in tokenizer(list(rows["answer"]))["input_ids"]) + 1 <= 24
    )  # the end token is one of them
    assert model.CONTEXT >= 96 + 24


def test_the_tokenizer_gives_back_what_it_read() -> None:
    tokenizer = model.build_tokenizer()
    rows = task.prompts(50, 1)
    for text in [*rows["prompt"], *rows["answer"], model.SYMBOLS]:
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) == model.VOCABULARY


def test_the_packages_own_answer_scores_one_and_another_less() -> None:
    rows = task.prompts(200, 2)
    answers, entries = rows["answer"], rows["entry"]
    assert task.reward([f" {answer}" for answer in answers], entries) == [1.0] * 200
    assert task.exact_rate(answers, entries) == [1.0] * 200
    wrong = task.reward(["nothing"] * 200, entries)
    assert max(wrong) < 1.0
    assert task.exact_rate(["nothing"] * 200, entries) == [0.0] * 200


def test_the_score_is_the_packages() -> None:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("spell_backward", size=3, seed=7)
    for entry in dataset:
        half = entry["answer"][:2] + "?" * (len(entry["answer"]) - 2)
        assert task.score(half, entry) == dataset.score_answer(half, entry)


@pytest.mark.parametrize("p_right", [0.0, 0.5, 1.0])
def test_supervised_answers_are_right_as_often_as_asked(p_right: float) -> None:
    right = {task.prompt_of(entry): entry["answer"] for entry in task.entries(4000, 0)}
    known = [pair for pair in task.supervised_batch(random.Random(1), 3000, p_right) if pair[0] in right]
    rate = sum(right[prompt] == answer for prompt, answer in known) / len(known)
    # an answer of another entry of the same exercise is right by chance now and then
    assert p_right <= rate + 0.05
    assert rate <= p_right + 0.45 * (1 - p_right)


def _parameters(size: str) -> Any:
    with torch.device("meta"):
        return model.build_model(size)


@pytest.mark.parametrize("size", ["200m", "200m-unshared"])
def test_the_large_sizes_have_200_million_parameters(size: str) -> None:
    assert sum(parameter.numel() for parameter in _parameters(size).parameters()) >= 200_000_000


@pytest.mark.parametrize("size", job.SIZES["reasoning"])
def test_every_size_fits_groups_of_128_and_the_kernels(size: str) -> None:
    one = model.SIZES[size]
    assert all(length % 128 == 0 for length in (one.hidden, one.inner, one.shared))
    for length in (one.hidden, one.inner):
        for name in ("int4", "nvfp4", "mxfp8", "fp8_block"):
            get(name).check_length(length, name="experts")


def _formats(configured: Any, size: str = "200m") -> dict[str, set[str]]:
    """Format -> the layers and roles that have it."""
    one = job.job_of("reasoning", size)
    recipe = swapq.Recipe.named(one.recipe(configured.recipe), **configured.changes())
    found: dict[str, set[str]] = {}
    for entry in swapq.plan(_parameters(size), recipe):
        role = getattr(entry.role, "value", entry.role)
        layer = entry.name.split(".layers.")[1].split(".")[0] if ".layers." in entry.name else ""
        found.setdefault(entry.format, set()).add(f"{role} {layer}")
    return found


@pytest.mark.parametrize(
    ("label", "layers", "shared"),
    [
        ("nvfp4-dequantized", range(10), False),
        ("nvfp4-last-0", range(12), False),
        ("nvfp4-last-0.3", range(8), False),
        ("nvfp4-first-bf16", range(1, 10), False),
        ("nvfp4-shared-mxfp8", range(10), True),
    ],
)
def test_a_precision_run_quantizes_exactly_what_it_says(label: str, layers: range, shared: bool) -> None:
    found = _formats(configuration.named([label])[0])
    assert found["nvfp4"] == {f"routed_experts {layer}" for layer in layers}
    assert found.get("mxfp8", set()) == ({f"shared_experts {layer}" for layer in layers} if shared else set())


def test_a_run_of_shared_experts_has_shared_experts_to_quantize() -> None:
    assert all(model.SIZES[size].shared for size in ("tiny", "200m"))


def test_every_configuration_plans_on_every_size() -> None:
    for size in job.SIZES["reasoning"]:
        for one in configuration.ALL:
            assert (len(_formats(one, size)) > 1) == (one.label != configuration.CONTROL), one.label


def test_int4_uses_the_named_recipe_with_groups_of_128() -> None:
    assert job.job_of("reasoning", "tiny").recipe("int4-qat") == "int4-qat"
    assert set(_formats(configuration.named(["int4-qat"])[0])) == {"int4", "bf16"}


def test_the_start_has_another_folder_for_another_size_task_or_setting() -> None:
    jobs = [job.job_of("reasoning", "tiny"), job.job_of("reasoning", "200m"), job.job_of("arithmetic", "tiny")]
    keys = {one.lesson.key(one.warmup) for one in jobs}
    keys.add(jobs[0].lesson.key(warmup.Warmup()))
    assert len(keys) == 4


@pytest.mark.parametrize("bf16", [False, True])
def test_the_start_learns_into_fp32_masters_and_stops_at_its_target(
    bf16: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    one = job.job_of("reasoning", "tiny")
    student = one.lesson.build_model()
    before = {name: parameter.detach().clone() for name, parameter in student.named_parameters()}
    pairs = [(task.prompt_of(entry), entry["answer"]) for entry in task.entries(2, 0)]
    lesson = dataclasses.replace(
        one.lesson, batch=lambda rng, size, p: [rng.choice(pairs) for _ in range(min(size, 8))]
    )
    settings = warmup.Warmup(steps=150, batch=8, learning_rate=2e-3, ramp=5, clip=1.0, target=0.8)
    warmup.teach(student, one.lesson.build_tokenizer(), settings, lesson=lesson, quiet=True, bf16=bf16)
    steps = [line for line in capsys.readouterr().out.splitlines() if "step" in line]
    assert float(steps[-1].split()[-1]) >= 0.8
    assert len(steps) < 6
    assert all(parameter.dtype == torch.float32 for parameter in student.parameters())
    changed = {name for name, parameter in student.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed >= {name for name in before if "experts.gate_up_proj" in name or "q_proj.weight" in name}


def test_a_start_that_does_not_reach_its_target_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    one = job.job_of("reasoning", "tiny")
    settings = warmup.Warmup(steps=2, batch=2, target=0.9)
    warmup.teach(one.lesson.build_model(), one.lesson.build_tokenizer(), settings, lesson=one.lesson, quiet=True)
    assert "2 steps did not reach 0.9" in capsys.readouterr().out


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(ValueError, match="no model of size 'huge'"):
        job.job_of("reasoning", "huge")


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    task._package.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    try:
        with pytest.raises(swapq.SwapqError, match=r"pip install 'swapq\[gym\]'"):
            task._package()
    finally:
        task._package.cache_clear()


def test_entries_survive_the_dataset_they_travel_in() -> None:
    rows = task.prompts(20, 9)
    for prompt, answer, text in zip(rows["prompt"], rows["answer"], rows["entry"], strict=True):
        entry = json.loads(text)
        assert prompt.startswith(entry["question"])
        assert answer == entry["answer"]
