"""What the main job refuses before it trains: exit code 2 and one line."""

from pathlib import Path

import pytest
import torch

from tests.helpers.examples import import_example
from tests.helpers.models import qwen3_moe

pytest.importorskip("trl")


@pytest.fixture
def start(tmp_path: Path) -> Path:
    qwen3_moe().to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def refused(start: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    job = import_example("grpo_arithmetic")
    monkeypatch.setattr("sys.argv", ["grpo_arithmetic.py", "--model", str(start), "--steps", "1"])
    capsys.readouterr()
    assert job.main() == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(said) == 1, said
    assert said[0].startswith(f"error: {start}: ")
    return said[0]


def test_a_start_without_a_tokenizer_is_refused(
    start: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "save the model's own tokenizer beside it" in refused(start, capsys, monkeypatch)


def test_a_start_whose_tokenizer_knows_no_digits_is_refused(
    start: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = import_example("arithmetic.model")
    model.character_tokenizer([*model.SPECIAL, "a", "b"], max_length=64).save_pretrained(start)
    assert "its tokenizer makes" in refused(start, capsys, monkeypatch)


def test_a_start_whose_tokenizer_is_another_models_is_refused(
    start: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = import_example("arithmetic.model")
    padding = [f"<{i}>" for i in range(1000)]
    model.character_tokenizer([*model.SPECIAL, *padding, *model.SYMBOLS], max_length=64).save_pretrained(start)
    assert "they do not belong together" in refused(start, capsys, monkeypatch)


@pytest.mark.parametrize("damage", ["no weights", "cut", "config"])
def test_a_start_that_cannot_be_opened_is_refused(
    start: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    import_example("arithmetic.model").build_tokenizer().save_pretrained(start)
    if damage == "no weights":
        (start / "model.safetensors").unlink()
    elif damage == "cut":
        (start / "model.safetensors").write_bytes((start / "model.safetensors").read_bytes()[:-1])
    else:
        (start / "config.json").write_text('{"model_type": "nothing"}')
    assert "cannot be opened" in refused(start, capsys, monkeypatch)
