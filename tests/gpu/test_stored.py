"""FP8 block and INT4 on a GPU: any number of rows has one set of bits, in the trainer and in the engine, near the reference's."""

import pytest
import torch

import swapq
from swapq import formats
from swapq.formats import Parts
from swapq.kernels import dispatch
from swapq.nn.gate import activation_table
from tests.gpu.test_kernels import CUDA, E, H, I, routed, sample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
FORMATS = ("fp8_block", "int4_g32", "int4")
SIZES = [(H, I), (160, 96), (2048, 768)]


def block(fmt: str, hidden: int, inner: int) -> tuple[Parts, Parts, str]:
    form = formats.get(fmt)
    scope = form.scope_of_stack(2 * inner, 2)
    up = swapq.quantize(sample("normal", E, 2 * inner, hidden, seed=1) * 0.05, fmt, scope=scope)
    down = swapq.quantize(sample("normal", E, hidden, inner, seed=2) * 0.05, fmt)
    return form.stored(up.parts), form.stored(down.parts), scope


@pytest.mark.parametrize(
    ("fmt", "hidden", "inner"), [(f, h, i) for f in FORMATS for h, i in SIZES if f != "int4" or i % 128 == 0]
)
def test_a_row_has_the_same_bits_in_every_batch(fmt: str, hidden: int, inner: int) -> None:
    from swapq.kernels import fast

    up, down, scope = block(fmt, hidden, inner)
    x, ids, weights = routed(700, hidden)
    table = activation_table("silu", CUDA)
    many = fast.stored_block(x, ids, weights, up, down, fmt, table, scope=scope)
    assert many.isfinite().all()
    for tokens in (1, 3, 64, 200):
        few = fast.stored_block(x[:tokens], ids[:tokens], weights[:tokens], up, down, fmt, table, scope=scope)
        assert torch.equal(few, many[:tokens]), tokens


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "sparse"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(416, 256), (1536, 2048), (2048, 768)])
def test_no_bit_depends_on_the_tile(n: int, k: int, fmt: str, kind: str) -> None:
    from swapq.kernels.cuda.tiles import route
    from swapq.kernels.stored import _product, _rows

    form = formats.get(fmt)
    w = form.stored(swapq.quantize(sample(kind, E, n, k, seed=1), fmt).parts)
    x, ids = sample(kind, 200, k, seed=2), routed(200)[1]
    rows = _rows(x, fmt)
    products = [
        _product(rows, w, fmt, form.default_scope, route(ids, E, slots), spread=True) for slots in (16, 32, 128)
    ]
    assert products[0].isfinite().all()
    for other in products[1:]:
        assert torch.equal(other.view(torch.int16), products[0].view(torch.int16))


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "tiny", "sparse"])
@pytest.mark.parametrize("k", [208, 768])
def test_rows_for_fp8_weights_are_the_codes_of_what_swiglu_gives(k: int, kind: str) -> None:
    from swapq.kernels.cuda.elementwise import swiglu
    from swapq.kernels.cuda.quantize import row_operand

    x, table = sample(kind, 37, 2 * k), activation_table("silu", CUDA)
    for rows, found in ((x, row_operand(x, "fp8_block")), (swiglu(x, table), row_operand(x, "fp8_block", table=table))):
        expected = formats.get("fp8_block").quantize(rows, scope="row")
        assert torch.equal(found.values.view(torch.int16), expected.codes.to(torch.float16).view(torch.int16))
        assert torch.equal(found.scale, expected.scales)


def test_rows_of_scales_made_on_one_stream_are_there_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from swapq.kernels import stored

    monkeypatch.setattr(stored, "_kept_rows", {})
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(1 << 28)
        stored._scale_rows(300, 3, "tile", CUDA)
    with torch.cuda.stream(other):
        assert stored._scale_rows(300, 3, "tile", CUDA).tolist() == [row // 128 for row in range(300)]


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_block_is_the_reference_up_to_the_order_of_sums(fmt: str) -> None:
    from swapq.kernels import fast
    from swapq.nn.expert_block import FrozenExpertLinear, expert_block
    from swapq.nn.gate import Gate

    up, down, scope = block(fmt, H, I)
    x, ids, weights = routed(100)
    found = fast.stored_block(x, ids, weights, up, down, fmt, activation_table("silu", CUDA), scope=scope)
    form, rows = formats.get(fmt), fmt if fmt == "fp8_block" else "bf16"
    with dispatch.use("reference"):
        linears = [
            FrozenExpertLinear(*form.operand(form.loaded(p), scope=s, axis=-1), rows)
            for p, s in ((up, scope), (down, form.default_scope))
        ]
        expected = expert_block(x, ids.long(), weights, *linears, num_experts=E, gate=Gate("silu"))
    assert float((found.float() - expected.float()).norm() / expected.float().norm()) < 3e-3


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_cuda_graph_holds_the_block(fmt: str) -> None:
    from swapq.kernels import fast

    up, down, scope = block(fmt, H, I)
    x, ids, weights = routed(24)
    table = activation_table("silu", CUDA)
    fast.stored_block(x, ids, weights, up, down, fmt, table, scope=scope)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fast.stored_block(x, ids, weights, up, down, fmt, table, scope=scope)
    other, other_ids, other_weights = routed(24, seed=9)
    x.copy_(other), ids.copy_(other_ids), weights.copy_(other_weights)
    graph.replay()
    assert torch.equal(out, fast.stored_block(other, other_ids, other_weights, up, down, fmt, table, scope=scope))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_a_linear_has_the_same_bits_for_any_number_of_rows(fmt: str, rows: int) -> None:
    from swapq.nn.linear import frozen_linear

    q, bias = swapq.quantize(sample("normal", 416, 256, seed=4) * 0.05, fmt), sample("normal", 416, seed=6)
    x, activations = sample("heavy tails", rows, 256, seed=5), fmt if fmt == "fp8_block" else "bf16"
    y = frozen_linear(x, q, bias, activations)
    assert torch.equal(y[:1], frozen_linear(x[:1], q, bias, activations))
    with dispatch.use("reference"):
        expected = frozen_linear(x, q, bias, activations)
    assert float((y.float() - expected.float()).norm() / expected.float().norm()) < 3e-3
