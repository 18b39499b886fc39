"""Experts that arrive stacked, one tensor per part and layer: the same bits as one by one, and every fault is named."""

import pytest
import torch

import swapq
from tests.vllm import faults, inside, updates
from tests.vllm.conftest import RECIPES, Exports
from tests.vllm.engine import Engine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.parametrize(
        "recipe", ["nvfp4-rl", "mxfp8-rl", "fp8-block-rl", "int4-qat"], indirect=True, scope="session"
    ),
]

LAYER = "model.layers.0.mlp.experts"
CODES, DOWN = f"{LAYER}.gate_up_proj.weight", f"{LAYER}.down_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


def test_a_trainer_sends_the_stacks_of_its_export(engine: Engine, recipe: str) -> None:
    sent, built = engine(inside.sent_stacks, 1, recipe, RECIPES[recipe])
    assert sent == built
    assert CODES in sent
    assert DOWN in sent
    assert not any(name.startswith(f"{LAYER}.0.") for name in sent)


def test_stacks_give_the_same_bits_as_single_experts(engine: Engine, exports: Exports, recipe: str) -> None:
    folder = str(exports(recipe, 1))
    one_by_one = engine(updates.update_and_score, folder)
    engine(updates.update, str(exports(recipe)))
    assert not torch.equal(engine(inside.score), one_by_one)
    report, stacks = engine(updates.stacked_update, folder)
    assert torch.equal(engine(inside.score), one_by_one)
    assert engine(inside.served_digests) == swapq.digest(folder)
    assert report["verified"] == report["tensors"] == len(swapq.digest(folder))
    assert report["unverified"] == ()
    assert report["bytes"] == sum(t.nbytes for t in engine(inside.served).values())
    assert len(stacks) >= 4


def test_four_stacked_updates_end_where_they_began(engine: Engine, exports: Exports, recipe: str) -> None:
    first = str(exports(recipe))
    start, places = engine(updates.stacked_update_and_score, first), engine(inside.addresses)
    for seed in (1, 2):
        assert not torch.equal(engine(updates.stacked_update_and_score, str(exports(recipe, seed))), start)
    assert torch.equal(engine(updates.stacked_update_and_score, first), start)
    assert engine(inside.addresses) == places


def every_fault(recipe: str) -> list[tuple[str, str, str]]:
    scales = f"{CODES}_scale{'_inv' if recipe == 'fp8-block-rl' else ''}"
    found = [
        ("missing", CODES, "did not arrive"),
        ("missing", scales, "did not arrive"),
        ("misnamed", DOWN, "nearest name is"),
        ("repeated", DOWN, "twice"),
        ("both ways", CODES, "twice"),
        ("flipped", CODES, "bytes changed on the way"),
        ("flipped", scales, "bytes changed on the way"),
        ("stale", DOWN, "bytes changed on the way"),
        ("stale", NORM, "bytes changed on the way"),
        ("undigested", CODES, "no digest"),
        ("bf16", CODES, "bfloat16"),
        ("shape", DOWN, "shape"),
        ("raises", CODES, "RuntimeError"),
    ]
    if recipe in ("nvfp4-rl", "mxfp8-rl"):
        found.append(("nan_scale", scales, "NaN"))
    if recipe == "nvfp4-rl":
        found.append(("unequal", f"{CODES}_scale_2", "share one scale"))
    return found


def test_every_fault_is_named_and_closes_the_engine_until_a_whole_update(
    engine: Engine, exports: Exports, recipe: str
) -> None:
    folder = str(exports(recipe))
    good = engine(updates.stacked_update_and_score, folder)
    for fault, name, says in every_fault(recipe):
        raised, later = engine(faults.faulty_update, folder, fault, name, True)
        experts = f"{LAYER}." if fault in ("nan_scale", "unequal", "both ways") else name
        assert experts in raised, (fault, raised)
        assert says in raised, (fault, raised)
        assert "does not serve" in later, fault
        assert torch.equal(engine(updates.stacked_update_and_score, folder), good), f"{fault}: not repaired"


def test_a_byte_written_wrong_by_the_engine_is_found(engine: Engine, exports: Exports, recipe: str) -> None:
    single = f"{LAYER}.3.up_proj.weight"
    raised = engine(faults.changed_after_arrival, str(exports(recipe)), single, True)
    assert "does not hold what arrived" in raised
    assert CODES in raised
    engine(updates.stacked_update, str(exports(recipe)))


@pytest.mark.parametrize("side", ["gate_up_proj", "down_proj"])
def test_a_layer_that_comes_half_as_stacks_is_refused_by_name(
    engine: Engine, exports: Exports, recipe: str, side: str
) -> None:
    folder = str(exports(recipe))
    good = engine(updates.stacked_update_and_score, folder)
    raised = engine(faults.half_stacked_update, str(exports(recipe, 1)), LAYER, side)
    assert LAYER in raised
    assert "not a part of them each way" in raised
    assert torch.equal(engine(updates.stacked_update_and_score, folder), good)


@pytest.mark.parametrize("as_stacks", [False, True])
@pytest.mark.parametrize("name", [NORM, "model.layers.1.mlp.experts.3.up_proj.weight"])
def test_an_interrupted_update_closes_the_engine_until_a_whole_update(
    engine: Engine, exports: Exports, recipe: str, name: str, as_stacks: bool
) -> None:
    folder = str(exports(recipe))
    good = engine(updates.update_and_score, folder)
    assert "does not serve" in engine(faults.interrupted_update, str(exports(recipe, 1)), name, as_stacks)
    assert torch.equal(engine(updates.update_and_score, folder), good)


def test_an_engine_whose_weights_sleep_is_left_alone(engine: Engine, exports: Exports, recipe: str) -> None:
    folder = str(exports(recipe))
    good = engine(updates.update_and_score, folder)
    assert "wake_up" in engine(faults.update_asleep, str(exports(recipe, 1)))
    assert torch.equal(engine(inside.score), good)
