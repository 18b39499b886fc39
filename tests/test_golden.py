"""Golden vectors: every byte that the contract fixes, with no tolerance."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import swapq
from swapq.formats import get, hadamard

FOLDER = Path(__file__).parent / "golden"
EVERY = json.loads((FOLDER / "index.json").read_text())
INDEX = [e for e in EVERY if e["format"] != "rht"]
FILES = {e["file"]: load_file(FOLDER / e["file"]) for e in EVERY}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.t().contiguous().t(),
    "strided": lambda x: torch.stack((x, torch.full_like(x, torch.nan)), dim=-1)[..., 0],
}


def case_tensors(entry: dict) -> dict[str, Tensor]:
    prefix = entry["case"] + "/"
    return {k.removeprefix(prefix): v for k, v in FILES[entry["file"]].items() if k.startswith(prefix)}


def quantize(entry: dict, x: Tensor, amax: Tensor | None = None) -> swapq.QTensor:
    if entry.get("cast_to_bf16"):
        x = x.to(torch.bfloat16)
    if entry["format"] == "mxfp8":
        return swapq.quantize(x, "mxfp8", axis=-2 if entry["scope"] == "column" else -1)
    if entry["format"] == "fp8_block":
        return swapq.quantize(x, "fp8_block", scope=entry["scope"])
    if entry["format"] == "int4":
        return swapq.quantize(x, "int4", block=entry["group"])
    return swapq.quantize(x, "nvfp4", scope="tensor" if entry["scope"] == "pair" else entry["scope"], amax=amax)


def differing_bytes(a: Tensor, b: Tensor) -> int:
    assert a.shape == b.shape
    return int((a.contiguous().reshape(-1).view(torch.uint8) != b.contiguous().reshape(-1).view(torch.uint8)).sum())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("entry", INDEX, ids=lambda e: e["case"])
def test_every_byte_equals_the_golden_vector(entry: dict, layout: str) -> None:
    case = case_tensors(entry)
    pair = entry["scope"] == "pair"
    halves = ("gate/", "up/") if pair else ("",)
    amax = None
    if pair:
        amax = torch.stack([case[h + "input"].abs().amax().float() for h in halves]).amax()
    for half in halves:
        q = quantize(entry, LAYOUTS[layout](case[half + "input"]), amax)
        assert differing_bytes(q.codes, case[half + "codes"]) == 0
        assert differing_bytes(q.scales, case[half + "scales"]) == 0
        assert differing_bytes(q.dequantize(torch.float32), case[half + "dequantized"]) == 0
        if entry["format"] == "nvfp4":
            assert q.global_scale is not None
            assert differing_bytes(q.global_scale, case["global_scale" if pair else half + "global_scale"]) == 0


@pytest.mark.parametrize("entry", [e for e in INDEX if "underflowed_blocks" in e], ids=lambda e: e["case"])
def test_the_count_of_underflowed_blocks_equals_the_golden_count(entry: dict) -> None:
    case = case_tensors(entry)
    if entry["scope"] == "pair":
        amax = torch.stack([case[h + "/input"].abs().amax().float() for h in ("gate", "up")]).amax()
        inputs = [case["gate/input"], case["up/input"]]
    else:
        amax, inputs = None, [case["input"]]
    count = 0
    for x in inputs:
        q = quantize(entry, x, amax)
        x = x.to(torch.bfloat16) if entry.get("cast_to_bf16") else x
        count += get(entry["format"]).underflowed_blocks(x, q.parts, scope=q.scope, axis=q.axis)
    assert count == entry["underflowed_blocks"]


@pytest.mark.parametrize("entry", INDEX, ids=lambda e: e["case"])
def test_operand_times_scale_is_the_dequantized_value(entry: dict) -> None:
    if entry["scope"] == "pair":
        pytest.skip("a pair is two tensors of tensor scope, tested as such")
    q = quantize(entry, case_tensors(entry)["input"])
    values, scale = q.operand()
    assert values.dtype == torch.bfloat16
    if q.format == "fp8_block":
        wide = scale.repeat_interleave(128, -1)[..., : values.shape[-1]]
        assert differing_bytes(values.float() * wide, q.dequantize(torch.float32)) == 0
    elif scale is None:
        expected = q.dequantize(torch.float32).to(torch.bfloat16)
        assert differing_bytes(values, expected) == 0
    else:
        spread = scale[:, None] if q.scope == "row" else scale
        assert differing_bytes(values.float() * spread, q.dequantize(torch.float32)) == 0


@pytest.mark.parametrize("entry", [e for e in EVERY if e["format"] == "rht"], ids=lambda e: e["case"])
def test_the_hadamard_transform_and_its_codes_equal_the_golden_vector(entry: dict) -> None:
    case = case_tensors(entry)
    for change in LAYOUTS.values():
        transformed = hadamard.transform(change(case["input"]))
        assert differing_bytes(transformed, case["transformed"]) == 0
        q = swapq.quantize(transformed, "nvfp4")
        for got, key in ((q.codes, "codes"), (q.scales, "scales"), (q.global_scale, "global_scale")):
            assert got is not None
            assert differing_bytes(got, case[key]) == 0


def test_every_format_of_the_index_is_compared() -> None:
    assert {e["format"] for e in EVERY} == {"mxfp8", "nvfp4", "fp8_block", "int4", "rht"}
    assert len(EVERY) > 150
