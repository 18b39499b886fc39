"""The audit of two sides: every weight that runs in other formats is named, and no other."""

from pathlib import Path

import pytest

import swapq
from swapq.diagnostics import audit, running
from swapq.diagnostics.audit import Runs
from tests.helpers.mixed import mixed
from tests.helpers.models import FAMILIES, qwen3_moe
from tests.helpers.remote import listed_experts

KEPT = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gpt_oss"])
@pytest.mark.parametrize("recipe", ["nvfp4-rl", "mxfp8-rl", "bf16"])
def test_a_model_and_its_export_run_alike(tmp_path: Path, family: str, recipe: str) -> None:
    model = swapq.convert(FAMILIES[family](), recipe, **({"last_layers_bf16": 0} if recipe == "nvfp4-rl" else {}))
    swapq.export(model, tmp_path)
    if recipe != "bf16":
        assert {runs for runs in running(model).values()} - {Runs("bf16", "bf16")}
        assert audit(model, FAMILIES[family]()).keys() == running(tmp_path).keys()
    assert audit(model, tmp_path) == audit(tmp_path, model) == {}


def test_one_layer_that_differs_is_named_alone() -> None:
    other = swapq.convert(qwen3_moe(), mixed(keep_bf16=[KEPT]))
    assert audit(swapq.convert(qwen3_moe(), mixed()), other) == {
        f"{KEPT}.weight": (Runs("mxfp8", "mxfp8"), Runs("bf16", "bf16"))
    }


def test_a_module_that_lost_its_swap_is_seen_although_the_plan_is_as_it_was() -> None:
    model = swapq.convert(qwen3_moe(), mixed())
    model.model.layers[0].self_attn.o_proj = qwen3_moe().model.layers[0].self_attn.o_proj
    assert list(audit(swapq.convert(qwen3_moe(), mixed()), model)) == [f"{KEPT}.weight"]


def test_an_engines_rank_answers_for_what_it_holds() -> None:
    model = swapq.convert(listed_experts(), "nvfp4-rl", last_layers_bf16=0)
    mine = {name: runs for name, runs in running(model).items() if ".experts.1." in name}
    assert audit(model, mine) == {}
    name = next(iter(mine))
    assert list(audit(model, mine | {name: ("nvfp4", "bf16")})) == [name]
    assert list(audit(model, {"model.layers.0.mlp.gate.weight": ("uint8 of SomeMethod", "unknown")})) == [
        "model.layers.0.mlp.gate.weight"
    ]
