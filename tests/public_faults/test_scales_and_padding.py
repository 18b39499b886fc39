"""Public faults 1 to 15: scales, dead experts, padding, blocks."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save
from torch import Tensor
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4

import swapq
from swapq.checkpoint.tensors import checkpoint_tensors
from swapq.headers import read_folder
from swapq.nn.storage import part_names
from tests.helpers.families import qwen_config, qwen_headers, write_folder
from tests.helpers.models import FAMILIES, prompts, qwen3_moe
from tests.public_faults.common import EXPERT, MODES, RECIPES, converted, edit, exported, gradients, logits, same_bytes
from tests.public_faults.common import load as load_model

SCOPES = [("nvfp4", "tensor"), ("nvfp4", "row"), ("nvfp4", "tile"), ("mxfp8", None)]


def dequantized(x: Tensor, fmt: str, scope: str | None) -> Tensor:
    return swapq.quantize(x, fmt, scope=scope).dequantize(torch.float32)


@pytest.mark.parametrize(
    "key", ["gate_proj.weight_scale", "up_proj.weight_scale_2", "down_proj.weight", "q_proj.weight_scale"]
)
def test_01_a_missing_key_of_a_quantized_weight_is_refused_by_name(tmp_path: Path, key: str) -> None:
    attention = key.startswith("q_proj")
    exported(tmp_path, "mxfp8-rl" if attention else "nvfp4-rl")
    name = f"model.layers.1.self_attn.{key}" if attention else f"{EXPERT}.{key}"
    edit(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(swapq.SwapqError, match=re.escape(name)):
        load_model(tmp_path)
    assert any(name in problem for problem in swapq.verify(tmp_path).problems)


@pytest.mark.parametrize("key", ["model.norm.weight", "model.layers.0.mlp.gate.weight", "lm_head.weight"])
def test_01_a_missing_unquantized_tensor_is_refused_instead_of_drawn_at_random(tmp_path: Path, key: str) -> None:
    edit(exported(tmp_path), lambda tensors: tensors.pop(key))
    with pytest.raises(swapq.SwapqError, match=re.escape(key)):
        load_model(tmp_path)


@settings(max_examples=60, deadline=None)
@given(exponent=st.integers(-149, 127), fill=st.floats(0, 1), seed=st.integers(0, 99), case=st.sampled_from(SCOPES))
def test_02_values_of_any_magnitude_give_finite_scales_and_values(
    exponent: int, fill: float, seed: int, case: tuple[str, str | None]
) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = (torch.rand(5, 64, generator=rng) - 0.5) * (torch.rand(5, 64, generator=rng) <= fill)
    x = torch.ldexp(x, torch.tensor(exponent)).to(torch.bfloat16)
    q = swapq.quantize(x, case[0], scope=case[1])
    for part in q.named_parts().values():
        assert part.float().isfinite().all()
    if case[0] == "mxfp8":
        assert (q.scales < 255).all()
    assert q.dequantize(torch.float32).isfinite().all()
    assert (q.dequantize(torch.float32).abs() <= 1.15 * x.float().abs().amax()).all()


def test_02_dead_experts_leave_a_model_finite() -> None:
    for recipe in RECIPES:
        model = qwen3_moe()
        with torch.no_grad():
            model.model.layers[0].mlp.experts.gate_up_proj[2] *= 1e-30
            model.model.layers[1].mlp.experts.down_proj[5] *= 1e-38
        assert logits(converted(recipe, model)).isfinite().all()
        assert all(g.isfinite().all() for g in gradients(model).values())


@pytest.mark.parametrize("case", SCOPES)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_03_all_zeros_quantize_to_exact_zeros_beside_anything(case: tuple[str, str | None], zero: float) -> None:
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    x[1], x[3, :32] = zero, zero
    whole = torch.stack((torch.full_like(x, zero), x))
    values = dequantized(whole, *case)
    assert values.isfinite().all()
    assert not values[0].any()
    assert not values[1, 1].any()
    assert torch.equal(values.signbit()[0], whole[0].signbit())  # the sign of zero is kept
    scale = swapq.quantize(whole, case[0], scope=case[1]).global_scale
    assert scale is None or scale[0].eq(1).all()  # not 0, whose inverse is Inf


def test_03_an_expert_of_zeros_and_a_token_of_zeros_give_zeros() -> None:
    for recipe, backward in MODES:
        model = qwen3_moe()
        with torch.no_grad():
            model.model.layers[0].mlp.experts.down_proj[:] = 0
        experts = converted(recipe, model, backward=backward).model.layers[0].mlp.experts
        x = torch.randn(6, 64).to(torch.bfloat16)
        x[2] = 0
        x.requires_grad_()
        y = experts(x, torch.randint(0, 8, (6, 2)), torch.rand(6, 2))
        y.float().sum().backward()
        assert not y.any()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in experts.parameters())


def test_04_weight_only_is_refused_before_anything_can_compute_with_it() -> None:
    with pytest.raises(swapq.SwapqError, match="weight-only"):
        swapq.Recipe.named("nvfp4-rl", activations="bf16")


@pytest.mark.parametrize("ratio", [8.0, 1e-3, 1e6])
def test_05_gate_and_up_share_their_scale_and_both_stay_accurate(ratio: float) -> None:
    model = qwen3_moe()
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj[:, 32:] *= ratio
    master = model.model.layers[0].mlp.experts.gate_up_proj.detach().to(torch.bfloat16)
    experts = converted(model=model).model.layers[0].mlp.experts
    tensors = dict(checkpoint_tensors(model))
    for e in range(8):
        stem = f"model.layers.0.mlp.experts.{e}"
        assert same_bytes(tensors[f"{stem}.gate_proj.weight_scale_2"], tensors[f"{stem}.up_proj.weight_scale_2"])
    q = experts.quantized()["gate_up_proj"]
    assert_within_half_a_step(master, q)


def assert_within_half_a_step(x: Tensor, q: swapq.QTensor) -> None:
    """The stored scale is the one that was used: every value lies within the E2M1 or E4M3 rounding of its own block."""
    form, values = q.spec, q.dequantize(torch.float32)
    blocks, error = (t.unflatten(-1, (-1, form.block)) for t in (x.float(), (values - x.float()).abs()))
    amax = blocks.abs().amax(-1, keepdim=True)
    if q.format == "nvfp4":
        scale = q.scales.float().unsqueeze(-1) * q.global_scale[..., None, None, None]
        steps = torch.where(blocks.abs() > 4 * scale, 1.0, torch.where(blocks.abs() > 2 * scale, 0.5, 0.25)) * scale
        saturated = amax > 6 * scale
        floor = 2.0**-10 * 6 * q.global_scale[..., None, None, None]  # a block whose scale is subnormal
        assert ((error <= steps * 1.001) | saturated & (error <= amax * 0.1 + floor) | (error <= floor)).all()
    else:
        assert (error <= blocks.abs() * 2.0**-4 + amax * 2.0**-16 + 2.0**-133).all()


def test_06_a_global_scale_multiplies() -> None:
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    q = swapq.quantize(x, "nvfp4")
    assert q.global_scale is not None
    assert torch.allclose(q.global_scale, x.abs().amax().float() / 2688, rtol=1e-6)
    twice = swapq.QTensor(q.codes, q.scales, "nvfp4", "tensor", -1, torch.bfloat16, q.global_scale * 2)
    assert torch.equal(twice.dequantize(torch.float32), 2 * q.dequantize(torch.float32))


SPELLINGS = [("to_q", "to_k", "to_v"), ("wq", "wk", "wv"), ("q_proj", "k_proj", "v_proj"), ("query", "key", "value")]


@pytest.mark.parametrize("names", SPELLINGS, ids=lambda names: names[0])
def test_07_attention_of_any_spelling_is_tied_as_a_whole_or_not_at_all(tmp_path: Path, names: tuple[str, ...]) -> None:
    spelled = {
        ".".join(
            dict(zip(("q_proj", "k_proj", "v_proj"), names, strict=True)).get(part, part) for part in key.split(".")
        ): value
        for key, value in qwen_headers().items()
    }
    folder = write_folder(tmp_path, qwen_config(), spelled)
    found = {e.format for e in swapq.plan(folder, "mxfp8-rl") if e.name.rpartition(".")[0].rpartition(".")[2] in names}
    assert found == {"mxfp8"}
    with pytest.raises(swapq.SwapqError, match=names[0]):
        swapq.plan(folder, swapq.Recipe.named("mxfp8-rl", keep_bf16=(names[0],)))
    kept = swapq.plan(folder, swapq.Recipe.named("mxfp8-rl", keep_bf16=names))
    assert {e.format for e in kept if e.name.rpartition(".")[0].rpartition(".")[2] in names} == {"bf16"}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    spread=st.integers(0, 12),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_08_the_stored_scale_is_the_scale_that_was_used(seed: int, spread: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 8, 64, generator=rng) * torch.exp2(torch.rand(3, 8, 64, generator=rng) * -spread)
    for fmt in ("nvfp4", "mxfp8"):
        assert_within_half_a_step(x.to(dtype), swapq.quantize(x.to(dtype), fmt))


def test_09_scales_spelt_as_bytes_and_as_e8m0_load_alike(tmp_path: Path) -> None:
    expected = logits(converted("mxfp8-rl"))
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        exported(tmp_path, "mxfp8-rl")
        edit(tmp_path, lambda t, d=dtype: t.update({k: v.view(d) for k, v in t.items() if k.endswith(".weight_scale")}))
        assert torch.equal(logits(load_model(tmp_path)), expected)


PART_DTYPES = [
    ("mxfp8-rl", "codes", torch.float8_e4m3fn, True),
    ("mxfp8-rl", "scales", torch.float8_e8m0fnu, True),
    ("nvfp4-rl", "scales", torch.float8_e4m3fn, True),
    ("mxfp8-rl", "codes", torch.bfloat16, False),
    ("mxfp8-rl", "scales", torch.float8_e4m3fn, False),
    ("nvfp4-rl", "codes", torch.float8_e4m3fn, False),
    ("nvfp4-rl", "scales", torch.int32, False),
    ("nvfp4-rl", "global_scale", torch.bfloat16, False),
]


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("recipe", "part", "dtype", "good"), PART_DTYPES)
def test_10_codes_and_scales_load_as_bytes_or_are_refused(
    recipe: str, part: str, dtype: torch.dtype, good: bool, assign: bool
) -> None:
    model, target = converted(recipe, trainable=False), converted(recipe, trainable=False)
    name = f"model.layers.0.mlp.experts.{part_names('gate_up_proj')[part]}"
    state = model.state_dict()
    given_part = state[name].view(dtype) if dtype.itemsize == state[name].element_size() else state[name].to(dtype)
    if not good:
        with pytest.raises(swapq.SwapqError, match=f"{name} is {dtype}"):
            target.load_state_dict(state | {name: given_part}, assign=assign)
        return
    target.load_state_dict(state | {name: given_part}, assign=assign)
    assert swapq.digest(target) == swapq.digest(model)


def test_11_our_files_load_from_memory(tmp_path: Path) -> None:
    for recipe in RECIPES:
        exported(tmp_path / recipe, recipe)
        expected = load_file(tmp_path / recipe / "model.safetensors")
        found = load((tmp_path / recipe / "model.safetensors").read_bytes())
        again = load(save(found))
        assert found.keys() == again.keys() == expected.keys() == read_folder(tmp_path / recipe).tensors.keys()
        assert all(same_bytes(found[k], v) and same_bytes(again[k], v) for k, v in expected.items())


def test_12_the_low_nibble_is_the_even_element_for_two_independent_readers() -> None:
    order = torch.tensor([0.5, 1.0, 2.0, 3.0, 4.0, 6.0, -0.5, -6.0] * 4).reshape(2, 16)
    q = swapq.quantize(order.to(torch.bfloat16), "nvfp4")
    units = order.shape[0], order.shape[1]
    assert torch.equal(unpack_fp4_from_uint8(q.codes, *units, dtype=torch.float32), order)
    assert torch.equal(f4_unpacked_to_f32(unpack_uint4(q.codes)), order)
    assert q.codes[0, 0] == 0x21  # 0.5 is code 1, 1.0 is code 2


def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make every uninitialized allocation hold NaN (or 0xFF), as a neighbour's memory may."""
    made: list[int] = []

    def poison(x: Tensor) -> Tensor:
        made.append(x.numel())
        with torch.no_grad():
            return x.fill_(torch.nan) if x.is_floating_point() else x.fill_(255 if x.dtype == torch.uint8 else 1 << 30)

    def wrap(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: poison(real(*args, **kwargs))

    monkeypatch.setattr(torch, "empty", wrap(torch.empty))
    monkeypatch.setattr(torch, "empty_like", wrap(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", wrap(Tensor.new_empty))
    return made


@pytest.mark.parametrize(("recipe", "backward"), MODES)
def test_13_uninitialized_memory_reaches_no_output(recipe: str, backward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = converted(recipe, backward=backward).model.layers[0].mlp.experts
    x, index, weights = torch.randn(11, 64).to(torch.bfloat16), torch.randint(-1, 9, (11, 2)), torch.rand(11, 2)

    def run() -> list[Tensor]:
        rows = x.clone().requires_grad_()
        experts.zero_grad()
        y = experts(rows, index, weights)
        y.float().square().sum().backward()
        return [y, rows.grad, experts.gate_up_proj.grad.clone(), experts.down_proj.grad.clone()]

    expected = run()
    made = poisoned(monkeypatch)
    found = run()
    assert made  # the patch was reached
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_13_a_slot_of_another_rank_contributes_nothing_whatever_its_weight() -> None:
    experts = converted().model.layers[0].mlp.experts
    x = torch.randn(4, 64).to(torch.bfloat16)
    index, plain = torch.tensor([[0, -1], [1, 99], [2, 3], [-1, 8]]), torch.rand(4, 2)
    clean = torch.where((index >= 0) & (index < 8), plain, 0)
    for poison in (torch.nan, torch.inf, 1e30):
        weights = torch.where((index >= 0) & (index < 8), plain, poison)
        assert torch.equal(experts(x, index, weights), experts(x, index, clean))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_14_a_cut_that_splits_a_block_is_refused_with_name_and_numbers(tmp_path: Path, tp: int) -> None:
    folder = write_folder(tmp_path, qwen_config(moe_intermediate_size=1856), qwen_headers(inner=1856))
    recipe = swapq.Recipe.named("nvfp4-rl", last_layers_bf16=0, expert_tp=tp)
    if (1856 // tp) % 16 == 0:
        assert swapq.plan(folder, recipe, tp=tp).quantized
        return
    with pytest.raises(swapq.SwapqError, match=rf"experts down: length 1856 over tp = {tp} is {1856 // tp} a rank.*16"):
        swapq.plan(folder, recipe, tp=tp)
    assert swapq.plan(folder, recipe.replace(expert_tp=1), tp=tp, ep=tp // 2)  # whole experts on each rank


def test_15_experts_without_a_gate_invent_nothing(tmp_path: Path) -> None:
    for recipe in RECIPES:
        torch.manual_seed(0)
        model = FAMILIES["nemotron_h"]()
        experts = next(m for n, m in model.named_modules() if n.endswith(".experts"))
        x, index, weights = torch.randn(9, 32).to(torch.bfloat16), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
        expected = experts(x.float(), index, weights)
        converted(recipe, model)
        error = (experts(x, index, weights) - expected).norm() / expected.norm()
        assert 1e-4 < error < 0.35  # relu squared doubles the error of 4 bits
        swapq.export(model, tmp_path / recipe)
        names = [n for n in load_file(tmp_path / recipe / "model.safetensors") if ".experts." in n]
        assert {n.split(".")[-2] for n in names} == {"up_proj", "down_proj"}
        assert torch.equal(logits(load_model(tmp_path / recipe)), model(prompts()).logits)
