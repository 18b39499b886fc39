"""An engine in which nothing is derived from a loaded tensor takes every tensor by a copy: no reload, the same bits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import swapq
from tests.vllm import faults, inside, updates
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
    engine = Engine(folders[0], enforce_eager=True, block_size=32, enable_prefix_caching=True)
    yield engine
    engine.close()


@pytest.mark.parametrize("stacked", [True, False])
def test_an_update_uses_no_reload(engine: Engine, folders: list[Path], stacked: bool) -> None:
    assert engine(updates.reloads, str(folders[0]), stacked) == 0


@pytest.mark.parametrize("stacked", [True, False])
def test_the_host_waits_for_the_device_only_when_all_work_of_an_update_is_queued(
    engine: Engine, folders: list[Path], stacked: bool
) -> None:
    tensors, events = engine(updates.reads_of_an_update, str(folders[0]), stacked)
    assert events.count("sums") >= 2 * tensors
    last = len(events) - events[::-1].index("sums")
    # the engine's digests, the sender's, and whether some layer is damaged; those of what arrived but is not held as it was sent
    assert events[:last] == ["sums"] * last
    assert 3 <= len(events[last:]) <= 4


def test_an_update_empties_the_prefix_cache_and_visits_only_what_is_in_it(engine: Engine, folders: list[Path]) -> None:
    found = engine(updates.prefix_cache_after_an_update, str(folders[1]))
    assert found["before"] > 0
    assert found["after"] == 0
    assert found["visited"] == found["before"] < found["all"]
    assert found["same list"]


@pytest.mark.parametrize("preempted", [False, True], ids=["running", "preempted"])
def test_an_update_is_refused_while_a_request_has_begun_and_the_request_ends_over_the_old_weights(
    engine: Engine, folders: list[Path], preempted: bool
) -> None:
    engine(updates.stacked_update, str(folders[0]))
    said, ends_as_undisturbed, holds_the_same = engine(faults.update_with_a_request_begun, str(folders[1]), preempted)
    assert "while requests run or wait to go on" in said
    assert ends_as_undisturbed
    assert holds_the_same
    engine(updates.stacked_update, str(folders[0]))


def test_copies_and_reload_give_the_same_bits(engine: Engine, folders: list[Path]) -> None:
    first, second = map(str, folders)
    reloaded = engine(updates.reloaded_score, second)
    assert engine(inside.served_digests) == swapq.digest(second)
    places = engine(inside.addresses)
    assert not torch.equal(engine(updates.update_and_score, first), reloaded)
    assert torch.equal(engine(updates.update_and_score, second), reloaded)
    engine(updates.update, first)
    assert torch.equal(engine(updates.stacked_update_and_score, second), reloaded)
    assert engine(inside.served_digests) == swapq.digest(second)
    assert engine(inside.addresses) == places


def test_a_sender_may_send_views_or_one_buffer(engine: Engine, folders: list[Path]) -> None:
    for update in (updates.update_from_views, updates.update_from_one_buffer):
        engine(updates.stacked_update, str(folders[0]))
        assert engine(update, str(folders[1])) == swapq.digest(folders[1])


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.gate.weight"]
)
@pytest.mark.parametrize("fault", ["missing", "flipped", "shape", "stale", "raises"])
def test_a_fault_in_a_copied_tensor_is_named(engine: Engine, folders: list[Path], fault: str, name: str) -> None:
    raised, later = engine(faults.faulty_update, str(folders[0]), fault, name, True)
    assert name in raised
    assert "does not serve" in later
    engine(updates.stacked_update, str(folders[0]))


def test_a_byte_of_a_merged_linear_written_wrong_is_found(engine: Engine, folders: list[Path]) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    assert name in engine(faults.changed_after_arrival, str(folders[0]), name, True)
    engine(updates.stacked_update, str(folders[0]))


def test_a_tied_head_may_be_sent_but_not_differ(tmp_path: Path) -> None:
    """Nothing loads the head of such a model, so only a comparison with the embedding can tell."""
    swapq.export(swapq.convert(tiny(tie_word_embeddings=True), "nvfp4-rl", last_layers_bf16=0), tmp_path / "tied")
    engine, folder = Engine(tmp_path / "tied", enforce_eager=True), str(tmp_path / "tied")
    try:
        assert engine(updates.reloads, folder, False) == 0
        assert engine(faults.update_with_tied_head, folder, False) == "nothing"
        assert engine(inside.verify_tied_head, folder, False) == []
        assert "lm_head.weight" in engine(faults.update_with_tied_head, folder, True)
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
