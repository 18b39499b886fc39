"""An engine in which nothing is derived from a loaded tensor takes every tensor by a copy: no reload, the same bits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import swapq
from tests.vllm import inside
from tests.vllm.conftest import tiny
from tests.vllm.engine import Engine

pytestmark = pytest.mark.vllm
RECIPES = ["nvfp4-rl", "mxfp8-rl"]


@pytest.fixture(scope="module", params=RECIPES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("copies")
    for seed in (0, 1):
        swapq.export(swapq.convert(tiny(seed), request.param, last_layers_bf16=0), root / str(seed))
    return [root / "0", root / "1"]


@pytest.fixture(scope="module")
def engine(folders: list[Path]) -> Iterator[Engine]:
    engine = Engine(folders[0], enforce_eager=True)
    yield engine
    engine.close()


@pytest.mark.parametrize("stacked", [True, False])
def test_an_update_uses_no_reload(engine: Engine, folders: list[Path], stacked: bool) -> None:
    assert engine(inside.reloads, str(folders[0]), stacked) == 0


def test_copies_and_reload_give_the_same_bits(engine: Engine, folders: list[Path]) -> None:
    first, second = map(str, folders)
    reloaded = engine(inside.reloaded_score, second)
    assert engine(inside.served_digests) == swapq.digest(second)
    places = engine(inside.addresses)
    assert not torch.equal(engine(inside.update_and_score, first), reloaded)
    assert torch.equal(engine(inside.update_and_score, second), reloaded)
    engine(inside.update, first)
    assert torch.equal(engine(inside.stacked_update_and_score, second), reloaded)
    assert engine(inside.served_digests) == swapq.digest(second)
    assert engine(inside.addresses) == places


def test_a_sender_may_send_views_or_one_buffer(engine: Engine, folders: list[Path]) -> None:
    for update in (inside.update_from_views, inside.update_from_one_buffer):
        engine(inside.stacked_update, str(folders[0]))
        assert engine(update, str(folders[1])) == swapq.digest(folders[1])


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.gate.weight"]
)
@pytest.mark.parametrize("fault", ["missing", "flipped", "shape", "stale", "raises"])
def test_a_fault_in_a_copied_tensor_is_named(engine: Engine, folders: list[Path], fault: str, name: str) -> None:
    raised, later = engine(inside.faulty_update, str(folders[0]), fault, name, True)
    assert name in raised
    assert "does not serve" in later
    engine(inside.stacked_update, str(folders[0]))


def test_a_byte_of_a_merged_linear_written_wrong_is_found(engine: Engine, folders: list[Path]) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    assert name in engine(inside.changed_after_arrival, str(folders[0]), name, True)
    engine(inside.stacked_update, str(folders[0]))


def test_a_tied_head_may_be_sent_but_not_differ(tmp_path: Path) -> None:
    """Nothing loads the head of such a model, so only a comparison with the embedding can tell."""
    swapq.export(swapq.convert(tiny(tie_word_embeddings=True), "nvfp4-rl", last_layers_bf16=0), tmp_path / "tied")
    engine, folder = Engine(tmp_path / "tied", enforce_eager=True), str(tmp_path / "tied")
    try:
        assert engine(inside.reloads, folder, False) == 0
        assert engine(inside.update_with_tied_head, folder, False) == "nothing"
        assert engine(inside.verify_tied_head, folder, False) == []
        assert "lm_head.weight" in engine(inside.update_with_tied_head, folder, True)
        assert engine(inside.verify_tied_head, folder, True) == ["lm_head.weight"]
    finally:
        engine.close()


def start_after_compiled_loops(llm: Any, directory: str) -> int:
    """An engine that starts in a process that has loaded numba: how many prompts it completes."""
    from vllm import LLM, SamplingParams

    from swapq.kernels import cpu

    assert cpu.compiled() is not None
    llm = LLM(model=directory, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=16, enforce_eager=True)
    params = SamplingParams(max_tokens=1, detokenize=False)
    return len(llm.generate([{"prompt_token_ids": p} for p in inside.PROMPTS], params, use_tqdm=False))


def test_an_engine_starts_in_a_process_that_has_loaded_the_compiled_loops(folders: list[Path]) -> None:
    pytest.importorskip("numba")
    process = Engine(None)
    try:
        assert process(start_after_compiled_loops, str(folders[0])) == len(inside.PROMPTS)
    finally:
        process.close()
