"""A fault in an update is caught and named, and the engine refuses to serve until a whole update lands."""

import pytest
import torch

from tests.vllm import faults, updates
from tests.vllm.conftest import Exports
from tests.vllm.engine import Engine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.parametrize("recipe", ["nvfp4-rl", "mxfp8-rl"], indirect=True, scope="session"),
]

EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"
KEPT = "model.layers.1.mlp.experts.3.up_proj.weight"  # BF16 in both recipes
NORM = "model.layers.1.input_layernorm.weight"
FAULTS = [
    ("missing", EXPERT, "did not arrive"),
    ("missing", EXPERT + "_scale", "did not arrive"),
    ("missing", KEPT, "did not arrive"),
    ("missing", NORM, "did not arrive"),
    ("misnamed", EXPERT + "_scale", "nearest name is"),
    ("repeated", EXPERT, "twice"),
    ("flipped", EXPERT, "bytes changed on the way"),
    ("flipped", EXPERT + "_scale", "bytes changed on the way"),
    ("flipped", NORM, "bytes changed on the way"),
    ("bf16", EXPERT, "bfloat16"),
    ("bf16", EXPERT + "_scale", "bfloat16"),
    ("shape", EXPERT, "shape"),
    ("raises", EXPERT, "RuntimeError"),
    ("raises", KEPT, "RuntimeError"),
    ("nan_scale", EXPERT + "_scale", "NaN"),
]


@pytest.mark.parametrize(("fault", "name", "says"), FAULTS, ids=[f"{f}-{n.split('.', 2)[2]}" for f, n, _ in FAULTS])
def test_a_fault_is_named_and_closes_the_engine(
    engine: Engine, exports: Exports, recipe: str, fault: str, name: str, says: str
) -> None:
    folder = str(exports(recipe))
    good = engine(updates.update_and_score, folder)
    raised, later = engine(faults.faulty_update, folder, fault, name)
    assert name in raised
    assert says in raised
    assert "does not serve" in later
    assert torch.equal(engine(updates.update_and_score, folder), good), "a whole update did not repair the engine"


def test_scales_of_another_dtype_are_refused(engine: Engine, exports: Exports, recipe: str) -> None:
    if recipe != "mxfp8-rl":
        pytest.skip("NVFP4 has no E8M0 scale")
    raised, later = engine(faults.faulty_update, str(exports(recipe)), "e8m0", EXPERT + "_scale")
    assert EXPERT + "_scale" in raised
    assert "float8_e8m0fnu" in raised
    assert "does not serve" in later


def test_gate_and_up_with_two_scales_are_refused(engine: Engine, exports: Exports, recipe: str) -> None:
    if recipe != "nvfp4-rl":
        pytest.skip("MXFP8 has no FP32 scale")
    assert "share one scale" in engine(faults.scale_pair, str(exports(recipe)), EXPERT + "_scale_2")


@pytest.mark.parametrize("name", [EXPERT, EXPERT + "_scale", KEPT, NORM, "model.layers.0.self_attn.k_proj.weight"])
def test_a_byte_written_wrong_by_the_engine_is_found(engine: Engine, exports: Exports, recipe: str, name: str) -> None:
    raised = engine(faults.changed_after_arrival, str(exports(recipe)), name)
    assert "does not hold what arrived" in raised
    if name != KEPT:  # packed experts: some expert of the layer is named
        assert name in raised
    engine(updates.update, str(exports(recipe)))
