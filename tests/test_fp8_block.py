"""FP8 block: the FP32 chain over slices bit for bit, tiles that stop at the border of gate and up, and what cannot be asked for."""

import numpy as np
import pytest
import torch
from torch import Tensor

import swapq
from swapq.formats import Operand
from swapq.kernels import sliced
from swapq.kernels.routing import Routing
from swapq.nn.expert_block import row_operand, row_parts
from swapq.nn.functional import LinearSpec, TrainableExpertLinear, quantize_weight
from tests.helpers import oracle

F = np.float32


def chain(x: Tensor, w: Tensor) -> np.ndarray:
    """Contract section 7's forward of BF16 ``x [M, K]`` and ``w [N, K]``: exact slice sums, then one float32 operation at a time."""
    xs, ws = (swapq.quantize(t, "fp8_block", scope=s) for t, s in ((x, "row"), (w, "tile")))
    total = np.zeros((x.shape[0], w.shape[0]), F)
    for j, start in enumerate(range(0, x.shape[1], 128)):
        a, b = (q.codes.float().double().numpy()[:, start : start + 128] for q in (xs, ws))
        rows = ws.scales.numpy()[:, j].repeat(128)[: w.shape[0]]
        scale = xs.scales.numpy()[:, j, None] * rows[None]
        total = total + (a @ b.T).astype(F) * scale
    return total


@pytest.mark.parametrize(("m", "n", "k"), [(5, 200, 300), (1, 128, 128), (17, 40, 512), (3, 130, 96)])
def test_the_product_follows_the_contracts_chain_bit_for_bit(m: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    x, w = (torch.randn(rows, k, generator=generator).mul(3 ** torch.randn(k, generator=generator)) for rows in (m, n))
    x, w = x.to(torch.bfloat16), w.to(torch.bfloat16)
    operand = row_operand(row_parts(x, "fp8_block"), "fp8_block")
    y = sliced.product(operand, swapq.quantize(w, "fp8_block").operand(), sliced.spans(k, 128))
    assert np.array_equal(y.numpy(), chain(x, w))


def test_the_order_of_the_slices_matters_so_it_is_fixed() -> None:
    """Large, small, minus large: another order gives other bits."""
    x = Operand(torch.ones(1, 384, dtype=torch.bfloat16), torch.tensor([[1.0, 2.0**-26, 1.0]]))
    w = Operand(torch.cat((torch.ones(1, 256), -torch.ones(1, 128)), 1).to(torch.bfloat16), torch.ones(1, 3))
    ascending = sliced.product(x, w, sliced.spans(384, 128))
    swapped = (
        Operand(x.values, x.scale[:, [0, 2, 1]]),
        Operand(w.values[:, list(range(128)) + list(range(256, 384)) + list(range(128, 256))], w.scale),
    )  # type: ignore[index]
    assert ascending.item() == 0
    assert sliced.product(*swapped, sliced.spans(384, 128)).item() == 2.0**-19


@pytest.mark.parametrize("inner", [48, 64, 128, 200, 256])
def test_gate_and_up_of_a_fused_weight_have_the_bytes_of_two_weights(inner: int) -> None:
    w = torch.randn(3, 2 * inner, 160, generator=torch.Generator().manual_seed(inner)).to(torch.bfloat16)
    w[:, :inner] *= 50
    fused = quantize_weight(w, "fp8_block", stacked=2)
    tiles = -(-inner // 128)
    for expert in range(3):
        for side, rows in enumerate((slice(inner), slice(inner, None))):
            alone = swapq.quantize(w[expert, rows], "fp8_block")
            assert torch.equal(fused.codes[expert, rows].view(torch.uint8), alone.codes.view(torch.uint8))
            assert torch.equal(fused.scales[expert, side * tiles : (side + 1) * tiles], alone.scales)
            assert torch.equal(fused.dequantize()[expert, rows], alone.dequantize())


@pytest.mark.parametrize("inner", [48, 200])
@pytest.mark.parametrize("mode", ["low_precision", "high_precision", "dequantized"])
def test_gradients_of_a_fused_weight_are_those_of_its_halves(mode: str, inner: int) -> None:
    """dgrad sums over N, so its slices stop at the border between gate and up as well."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(37, 160, generator=generator).to(torch.bfloat16).requires_grad_()
    w = (torch.randn(1, 2 * inner, 160, generator=generator) * 0.1).requires_grad_()
    dy = torch.randn(37, 2 * inner, generator=generator).to(torch.bfloat16)
    routing, spec = Routing.single(37, x.device), LinearSpec("fp8_block", "fp8_block", mode)
    q = quantize_weight(w, "fp8_block", stacked=2)
    dx, dw = torch.autograd.grad(TrainableExpertLinear(w, None, spec, q)(x, routing, gather=False), (x, w), dy)
    total = torch.zeros(37, 160)
    for rows in (slice(inner), slice(inner, None)):
        half = w[:, rows].detach().requires_grad_()
        y = TrainableExpertLinear(half, None, spec)(x, routing, gather=False)
        hx, hw = torch.autograd.grad(y, (x, half), dy[:, rows].contiguous())
        assert torch.equal(hw, dw[:, rows])
        total += hx.float()
    assert (dx.float() - total).norm() < 6e-3 * total.norm()  # two roundings to BF16 against one


def test_low_precision_weight_gradients_of_many_rows_equal_the_oracle() -> None:
    """More than one block of 128 rows, a partial one at the end."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(300, 40, generator=generator).to(torch.bfloat16).requires_grad_()
    w = torch.randn(1, 24, 40, generator=generator).requires_grad_()
    dy = torch.randn(300, 24, generator=generator).to(torch.bfloat16)
    y = TrainableExpertLinear(w, None, LinearSpec("fp8_block", "fp8_block", "low_precision"))(
        x, Routing.single(300, x.device), gather=False
    )
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    ref = oracle.linear(*(t.detach().float().numpy() for t in (x, w[0], dy)), "fp8_block", "low_precision")
    assert np.abs(dw[0].numpy() - ref[2]).max() < 1e-5 * np.abs(ref[2]).max()
    assert np.linalg.norm(dx.float().numpy() - ref[1]) < 4e-3 * np.linalg.norm(ref[1])


def test_columns_are_quantized_by_rows_of_tiles_only() -> None:
    q = swapq.quantize(torch.randn(300, 8).to(torch.bfloat16), "fp8_block", scope="row", axis=-2)
    assert q.scales.shape == (3, 8)
    with pytest.raises(swapq.SwapqError, match="square tile has no axis"):
        swapq.quantize(torch.randn(300, 8).to(torch.bfloat16), "fp8_block", axis=-2)
    with pytest.raises(swapq.SwapqError, match="3 rows have no halves"):
        swapq.quantize(torch.zeros(3, 8), "fp8_block", scope="halves")


def test_a_block_that_falls_below_the_floor_is_counted() -> None:
    x = torch.full((130, 256), 1e-20).to(torch.bfloat16)
    x[0, 0] = 1.0
    q = swapq.quantize(x, "fp8_block")
    assert q.spec.may_vanish(q.parts)
    assert q.spec.underflowed_blocks(x, q.parts, scope="tile", axis=-1) == 3
    tiny = torch.full((2, 64), 1e-7).to(torch.bfloat16)
    small = swapq.quantize(tiny, "int4", block=32)
    assert small.spec.underflowed_blocks(tiny, small.parts, scope="group", axis=-1) == 4


@pytest.mark.parametrize("shape", [(4, 64), (3, 6, 256), (0, 32)])
def test_int4_codes_survive_packing(shape: tuple[int, ...]) -> None:
    q = swapq.quantize(torch.randn(shape).to(torch.bfloat16), "int4", block=32)
    assert q.format == "int4_g32"
    assert q.codes.dtype == torch.int8
    stored = q.spec.stored(q.parts)
    assert stored.codes.dtype == torch.uint8
    assert stored.codes.shape == (*shape[:-1], shape[-1] // 2)
    assert torch.equal(q.spec.loaded(stored).codes, q.codes)
    if q.codes.numel():
        assert int(q.codes.min()) < 0 < int(q.codes.max())


def test_a_group_that_int4_has_not_is_refused_with_the_choice() -> None:
    with pytest.raises(swapq.SwapqError, match="choose 32, 128"):
        swapq.quantize(torch.zeros(2, 64), "int4", block=64)
    with pytest.raises(swapq.SwapqError, match="leave it out"):
        swapq.quantize(torch.zeros(2, 64), "nvfp4", block=32)


@pytest.mark.parametrize("trainable", [True, False])
def test_expert_tp_changes_no_bit_where_ranks_cut_between_blocks(trainable: bool) -> None:
    """One scale per 128 elements does not know how many ranks hold the row, unlike NVFP4's one per row."""
    from tests.helpers.models import prompts, qwen3_moe

    sizes = {"moe_intermediate_size": 256, "num_hidden_layers": 1}
    models = [swapq.convert(qwen3_moe(**sizes), "fp8-block-rl", expert_tp=tp, trainable=trainable) for tp in (1, 2)]
    with torch.no_grad():
        assert torch.equal(*(model(prompts()).logits for model in models))
    with pytest.raises(swapq.SwapqError, match="not a multiple of the fp8_block block of 128"):
        swapq.convert(qwen3_moe(**sizes), "fp8-block-rl", expert_tp=4)


def test_a_plan_knows_where_ranks_would_cut_a_tile() -> None:
    from tests.helpers.models import qwen3_moe

    model = qwen3_moe(moe_intermediate_size=256, hidden_size=256, head_dim=128, num_key_value_heads=2)
    swapq.plan(model, "fp8-block-rl", tp=2, ep=2)
    with pytest.raises(swapq.SwapqError, match=r"experts down: length 256 over tp = 4 is 64 a rank"):
        swapq.plan(model, "fp8-block-rl", tp=4)
    narrow = qwen3_moe(head_dim=48)
    swapq.plan(narrow, "fp8-block-rl")
    with pytest.raises(swapq.SwapqError, match=r"q_proj.weight: 192 rows over tp = 2 are 96 a rank"):
        swapq.plan(narrow, "fp8-block-rl", tp=2, ep=2)


def test_a_checkpoint_of_a_live_model_quantizes_each_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from swapq.checkpoint.tensors import checkpoint_tensors
    from swapq.nn import experts
    from tests.helpers.models import qwen3_moe

    model = swapq.convert(qwen3_moe(), "nvfp4-rl", last_layers_bf16=0)
    seen: list[tuple[int, ...]] = []
    real = experts.quantize_weight
    monkeypatch.setattr(
        experts, "quantize_weight", lambda w, *a, **k: (seen.append(tuple(w.shape)), real(w, *a, **k))[1]
    )
    list(checkpoint_tensors(model))
    assert seen == [(8, 64, 64), (8, 64, 32)] * 2
