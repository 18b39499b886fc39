"""The CUDA kernels beside their torch definitions: bytes of quantizers, bits of products, values of gradients."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import swapq
from swapq import formats
from swapq.formats import Parts
from swapq.kernels import dispatch
from swapq.kernels.routing import Routing
from swapq.nn.gate import activation_table

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CUDA = torch.device("cuda")
E, H, I, TOP = 16, 512, 256, 4  # noqa: E741
#: a tiny model's lengths are no multiples of 128
OPTIONS = {"int4-qat": {"weights": {"routed_experts": "int4_g32"}}}
KINDS = ("normal", "heavy tails", "every pattern", "tiny", "sparse", "huge")


def sample(kind: str, *shape: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator(CUDA).manual_seed(seed)
    x = torch.randn(*shape, device=CUDA, generator=g)
    if kind == "heavy tails":
        x = x * torch.exp(4 * torch.randn(*shape, device=CUDA, generator=g))
    if kind == "every pattern":
        bits = torch.randint(-32768, 32768, shape, device=CUDA, generator=g, dtype=torch.int32).to(torch.int16)
        x = bits.view(torch.bfloat16).float()
        x = torch.where(x.isfinite(), x, 0.0)
    if kind == "tiny":
        x = x * 1e-38
    if kind == "sparse":
        x = x * (torch.rand(*shape, device=CUDA, generator=g) < 0.05)
    if kind == "huge":
        x = x * 1e37
    return x.to(torch.bfloat16)


def differing(a: Parts, b: Parts) -> int:
    pairs = zip(a, b, strict=True)
    return sum(
        int((x.view(torch.uint8) != y.view(torch.uint8)).sum()) for x, y in pairs if x is not None and y is not None
    )


def differing_values(parts: Parts, fmt: str, scope: str, axis: int) -> int:
    """Elements in which a kernel's BF16 is not the definition's; a kernel has to be there."""
    found = dispatch.dequantize(parts, fmt, scope, axis)
    expected = formats.get(fmt).dequantize(parts, scope=scope, axis=axis).to(torch.bfloat16)
    assert found is not None
    assert found.shape == expected.shape
    return int((found.view(torch.int16) != expected.view(torch.int16)).sum())


@pytest.mark.parametrize("counts", [(130, 0, 128, 1), (0, 0, 300), (5,), (4096, 4000, 0, 129)])
@pytest.mark.parametrize("k", [16, 208, 768, 2048])
def test_columns_of_groups_have_the_bytes_of_padded_groups(counts: tuple[int, ...], k: int) -> None:
    from swapq.kernels.quantize_blocks import quantize_columns_of_groups

    rows = sum(counts)
    routing, x = Routing(torch.arange(rows, device=CUDA), counts, rows, 1), sample("heavy tails", rows, k)
    padded = routing.pad_rows(x, 128)[1]
    found = quantize_columns_of_groups(x, routing)
    assert differing(found, formats.get("fp8_block").quantize(padded, scope="row", axis=-2)) == 0


@pytest.mark.parametrize("shape", [(3, 192, 144), (1, 1, 16), (128, 1536, 2048)])
def test_bytes_are_turned_as_torch_turns_them(shape: tuple[int, ...]) -> None:
    from swapq.kernels.transpose import transposed

    x = torch.randint(0, 256, shape, device=CUDA, dtype=torch.uint8)
    assert torch.equal(transposed(x), x.transpose(1, 2).contiguous())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [32, 160, 768, 2048, 7168])
@pytest.mark.parametrize(
    ("fmt", "scope", "axis"),
    [
        ("nvfp4", "row", -1),
        ("nvfp4", "tensor", -1),
        ("mxfp8", "block", -1),
        ("mxfp8", "block", -2),
        ("fp8_block", "row", -1),
        ("fp8_block", "row", -2),
        ("fp8_block", "tile", -1),
        ("fp8_block", "halves", -1),
        ("int4_g32", "group", -1),
    ],
)
def test_a_quantizer_writes_the_bytes_of_the_reference(fmt: str, scope: str, axis: int, k: int, kind: str) -> None:
    x = sample(kind, 3, 72, k) if scope != "row" else sample(kind, 217, k)
    found = dispatch.quantize(x, fmt, scope, axis, None)
    assert found is not None
    assert differing(found, formats.get(fmt).quantize(x, scope=scope, axis=axis)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fmt", "scope"), [("nvfp4", "row"), ("nvfp4", "tensor"), ("mxfp8", "block"), ("fp8_block", "row")]
)
def test_a_thousand_million_values_have_the_bytes_of_the_reference(fmt: str, scope: str) -> None:
    from swapq.kernels.cuda.program import multiprocessors
    from swapq.kernels.cuda.quantize import _team

    assert _team(512, 2048, 2 * multiprocessors(CUDA)), "too large for the kernel that quantizes stacks"
    values = 0
    for seed in range(60):
        x = sample(KINDS[seed % len(KINDS)], 8704, 2048, seed=seed)
        x = x if scope == "row" else x.unflatten(0, (17, 512))
        found = dispatch.quantize(x, fmt, scope, -1, None)
        assert found is not None
        assert differing(found, formats.get(fmt).quantize(x, scope=scope, axis=-1)) == 0
        values += x.numel()
    assert values > 1_000_000_000


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "fp8_block"])
def test_a_bad_row_stays_visibly_bad_and_touches_no_other(fmt: str, bad: float) -> None:
    x = sample("normal", 64, H)
    x[7, 33] = bad
    scope = "block" if fmt == "mxfp8" else "row"
    parts = dispatch.quantize(x, fmt, scope, -1, None)
    assert parts is not None
    values = formats.get(fmt).dequantize(parts, scope=scope, axis=-1)
    assert not values[7].isfinite().all()
    x[7] = 0
    clean = dispatch.quantize(x, fmt, scope, -1, None)
    assert clean is not None
    keep = torch.arange(64, device=CUDA) != 7
    assert (
        differing(
            Parts(*(p if p is None else p[keep] for p in parts)), Parts(*(p if p is None else p[keep] for p in clean))
        )
        == 0
    )


@pytest.mark.parametrize(
    ("fmt", "scope"), [("nvfp4", "row"), ("nvfp4", "tensor"), ("mxfp8", "block"), ("fp8_block", "row")]
)
def test_a_view_that_is_not_aligned_has_the_same_bytes(fmt: str, scope: str) -> None:
    flat = sample("normal", 1 + 64 * 256)
    view = flat[1:].view(64, 256) if scope == "row" else flat[1:].view(1, 64, 256)
    assert view.data_ptr() % 16
    found, expected = (dispatch.quantize(x, fmt, scope, -1, None) for x in (view, view.clone()))
    assert found is not None
    assert expected is not None
    assert differing(found, expected) == 0


def test_a_matrix_too_large_to_be_held_on_the_gpu_has_the_bytes_of_the_reference() -> None:
    x = sample("heavy tails", 2, 4096, 7168)
    found = dispatch.quantize(x, "nvfp4", "tensor", -1, None)
    assert found is not None
    assert differing(found, formats.get("nvfp4").quantize(x, scope="tensor", axis=-1)) == 0


def test_a_new_thread_launches_kernels_too() -> None:
    x = sample("normal", 64, 256)
    expected = dispatch.quantize(x, "nvfp4", "row", -1, None)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(dispatch.quantize, x, "nvfp4", "row", -1, None).result()
    assert found is not None
    assert expected is not None
    assert differing(found, expected) == 0


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_a_linear_takes_one_row_without_a_batch_dimension(fmt: str) -> None:
    from swapq.nn.linear import frozen_linear

    q, x = swapq.quantize(sample("normal", 64, 160), fmt), sample("normal", 3, 160)
    assert torch.equal(frozen_linear(x[0], q, None, fmt), frozen_linear(x, q, None, fmt)[0])


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_dequantized_weights_are_those_of_the_reference(fmt: str) -> None:
    q = swapq.quantize(sample("heavy tails", 3, 64, 768), fmt)
    with dispatch.use("reference"):
        expected = q.dequantize(torch.bfloat16)
    assert torch.equal(q.dequantize(torch.bfloat16).view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fmt", "scope", "axis", "shape"),
    [
        ("fp8_block", "tile", -1, (3, 144, 768)),
        ("fp8_block", "tile", -1, (2, 130, 77)),
        ("fp8_block", "halves", -1, (3, 272, 208)),
        ("fp8_block", "row", -1, (3, 72, 208)),
        ("fp8_block", "row", -1, (217, 2048)),
        ("fp8_block", "row", -1, (1, 77)),
        ("fp8_block", "row", -1, (208,)),
        ("fp8_block", "row", -2, (217, 2048)),
        ("fp8_block", "row", -2, (3, 130, 77)),
        ("int4", "group", -1, (3, 72, 768)),
        ("int4", "group", -1, (217, 2048)),
        ("int4_g32", "group", -1, (3, 72, 160)),
        ("int4_g32", "group", -1, (217, 2016)),
    ],
)
def test_a_dequantizer_of_blocks_writes_the_bytes_of_the_reference(
    fmt: str, scope: str, axis: int, shape: tuple[int, ...], kind: str
) -> None:
    parts = formats.get(fmt).quantize(sample(kind, *shape), scope=scope, axis=axis)
    assert differing_values(parts, fmt, scope, axis) == 0


@pytest.mark.parametrize(
    ("fmt", "scope", "axis"),
    [
        ("fp8_block", "tile", -1),
        ("fp8_block", "halves", -1),
        ("fp8_block", "row", -1),
        ("fp8_block", "row", -2),
        ("int4", "group", -1),
        ("int4_g32", "group", -1),
    ],
)
def test_every_code_times_every_scale_has_the_bytes_of_the_reference(fmt: str, scope: str, axis: int) -> None:
    form, g = formats.get(fmt), torch.Generator(CUDA).manual_seed(0)
    bytes_ = torch.randint(0, 256, (2, 2048, 2048), dtype=torch.uint8, device=CUDA, generator=g)  # NaN codes too
    codes = bytes_.view(torch.int8 if fmt != "fp8_block" else torch.float8_e4m3fn)
    shape = form.part_shapes(form.logical_shape(codes), scope=scope, axis=axis)["scales"]
    # subnormal, NaN and Inf too
    bits = torch.randint(-(1 << 31), 1 << 31, shape, device=CUDA, generator=g).to(torch.int32)
    dtype = form.dtypes["scales"]
    scales = bits.view(torch.float32) if dtype == torch.float32 else bits.to(torch.int16).view(dtype)
    assert differing_values(Parts(codes, scales), fmt, scope, axis) == 0
    views = Parts(*(p.transpose(0, 1).contiguous().transpose(0, 1) for p in (codes, scales)))
    assert not views.codes.is_contiguous()
    assert differing_values(views, fmt, scope, axis) == 0


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "fp8_block"])
def test_rows_in_slices_are_dequantized_as_the_reference_does(fmt: str) -> None:
    from swapq.nn.expert_block import row_parts, row_values

    parts = row_parts(sample("heavy tails", 33, 512), fmt, slices=2)
    with dispatch.use("reference"):
        expected = row_values(parts, fmt, slices=2)
    assert torch.equal(row_values(parts, fmt, slices=2).view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize(("fmt", "scope"), [("fp8_block", "tile"), ("fp8_block", "row"), ("int4", "group")])
def test_a_dequantizer_of_blocks_keeps_nothing_beside_its_result(fmt: str, scope: str) -> None:
    q = swapq.quantize(sample("normal", 4, 1024, 1024), fmt, scope=scope)
    q.dequantize(torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    values = q.dequantize(torch.bfloat16)
    assert torch.cuda.max_memory_allocated() - before == values.numel() * 2


@pytest.mark.slow
@pytest.mark.parametrize(("fmt", "scope"), [("fp8_block", "tile"), ("fp8_block", "row"), ("int4", "group")])
def test_a_stack_beyond_two_to_the_31_is_dequantized_to_its_end(fmt: str, scope: str) -> None:
    one = swapq.quantize(sample("normal", 1, 2048, 4096), fmt, scope=scope)
    parts = Parts(*(p.expand(257, -1, -1).contiguous() for p in one.parts[:2]))  # 2^31 + 2^23 elements
    values = dispatch.dequantize(parts, fmt, scope, -1)
    assert values is not None
    expected = one.dequantize(torch.bfloat16)[0]
    for matrix in (0, 255, 256):
        assert torch.equal(values[matrix], expected)


def block(fmt: str, hidden: int = H, inner: int = I) -> tuple[Parts, Parts]:
    up = swapq.quantize(sample("normal", E, 2 * inner, hidden, seed=1) * 0.05, fmt)
    down = swapq.quantize(sample("normal", E, hidden, inner, seed=2) * 0.05, fmt)
    return up.parts, down.parts


def routed(tokens: int, hidden: int = H, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator(CUDA).manual_seed(seed)
    weights, ids = torch.topk(torch.rand(tokens, E, device=CUDA, generator=g), TOP)
    return sample("heavy tails", tokens, hidden, seed=seed), ids.to(torch.int32), weights


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize(("hidden", "inner"), [(H, I), (160, 96), (2048, 768), (1440, 736)])
def test_few_and_many_tokens_have_the_same_bits(fmt: str, hidden: int, inner: int) -> None:
    from swapq.kernels import fast

    up, down = block(fmt, hidden, inner)
    x, ids, weights = routed(700, hidden)
    table = activation_table("silu", CUDA)
    many = fast.stored_block(x, ids, weights, up, down, fmt, table)  # 175 slots an expert: expanded weights
    assert 700 * TOP > 64 * E
    for tokens in (1, 3, 17, 64, 200):
        few = fast.stored_block(x[:tokens], ids[:tokens], weights[:tokens], up, down, fmt, table)
        assert torch.equal(few, many[:tokens]), tokens


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_the_block_is_the_reference_up_to_the_order_of_sums(fmt: str) -> None:
    from swapq.kernels import fast
    from swapq.nn.expert_block import FrozenExpertLinear, expert_block
    from swapq.nn.gate import Gate

    up, down = block(fmt)
    x, ids, weights = routed(100)
    found = fast.stored_block(x, ids, weights, up, down, fmt, activation_table("silu", CUDA))
    form = formats.get(fmt)
    with dispatch.use("reference"):
        linears = [FrozenExpertLinear(*form.operand(p, scope=form.default_scope, axis=-1), fmt) for p in (up, down)]
        expected = expert_block(x, ids.long(), weights, *linears, num_experts=E, gate=Gate("silu"))
    assert float((found.float() - expected.float()).norm() / expected.float().norm()) < 2e-3


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_experts_of_another_rank_add_nothing(fmt: str) -> None:
    from swapq.kernels import fast

    up, down = block(fmt)
    x, ids, weights = routed(50)
    table = activation_table("silu", CUDA)
    whole = fast.stored_block(x, ids, weights, up, down, fmt, table).float()
    local = torch.full((E,), -1, dtype=torch.int32, device=CUDA)
    total = torch.zeros_like(whole)
    for half in (range(E // 2), range(E // 2, E)):
        local.fill_(-1)
        local[half.start : half.stop] = torch.arange(len(half), dtype=torch.int32, device=CUDA)
        mine = [Parts(*(p if p is None else p[half.start : half.stop].contiguous() for p in w)) for w in (up, down)]
        total += fast.stored_block(x, ids, weights, *mine, fmt, table, local_of=local).float()
    assert float((total - whole).norm() / whole.norm()) < 1e-2


def test_a_cuda_graph_holds_the_block() -> None:
    from swapq.kernels import fast

    up, down = block("nvfp4")
    x, ids, weights = routed(24)
    table = activation_table("silu", CUDA)
    expected = fast.stored_block(x, ids, weights, up, down, "nvfp4", table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fast.stored_block(x, ids, weights, up, down, "nvfp4", table)
    other, other_ids, other_weights = routed(24, seed=9)
    x.copy_(other), ids.copy_(other_ids), weights.copy_(other_weights)
    graph.replay()
    assert not torch.equal(out, expected)
    assert torch.equal(out, fast.stored_block(other, other_ids, other_weights, up, down, "nvfp4", table))


@pytest.mark.parametrize(
    ("recipe", "mode"),
    [
        ("nvfp4-rl", "high_precision"),
        ("nvfp4-rl", "dequantized"),
        ("mxfp8-rl", "low_precision"),
        ("mxfp8-rl", "high_precision"),
        ("mxfp8-rl", "dequantized"),
        ("fp8-block-rl", "low_precision"),
        ("fp8-block-rl", "high_precision"),
        ("fp8-block-rl", "dequantized"),
        ("int4-qat", "dequantized"),
    ],
)
def test_a_training_step_is_the_reference_up_to_the_order_of_sums(recipe: str, mode: str) -> None:
    from tests.helpers.models import qwen3_moe

    model = qwen3_moe().to(CUDA, torch.bfloat16)
    swapq.convert(model, recipe, backward=mode, last_layers_bf16=0, **OPTIONS.get(recipe, {}))
    ids = torch.arange(1, 60, device=CUDA)[None]

    def step() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad(set_to_none=True)
        out = model(ids, labels=ids)
        out.loss.backward()
        return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    logits, grads = step()
    with dispatch.use("reference"):
        expected, expected_grads = step()
    assert float((logits - expected).float().norm() / expected.float().norm()) < 2e-2
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        error = float(
            (grad - expected_grads[name]).float().norm() / expected_grads[name].float().norm().clamp(min=1e-12)
        )
        assert error < 0.1, (name, error)


@pytest.mark.parametrize("recipe", ["nvfp4-rl", "mxfp8-rl", "fp8-block-rl", "int4-qat"])
def test_the_trainers_experts_have_the_bits_of_the_engines(recipe: str) -> None:
    from swapq.kernels import fast
    from tests.helpers.models import qwen3_moe

    model = qwen3_moe().to(CUDA, torch.bfloat16)
    swapq.convert(model, recipe, last_layers_bf16=0, **OPTIONS.get(recipe, {}))
    experts = model.model.layers[0].mlp.experts
    fmt, hidden = experts.spec.weights, experts.swapq_layout.hidden
    g = torch.Generator(CUDA).manual_seed(5)
    weights, ids = torch.topk(torch.rand(33, experts.swapq_layout.num_experts, device=CUDA, generator=g), 2)
    x = sample("normal", 33, hidden)
    trained = experts(x, ids, weights)
    assert trained.requires_grad
    q = experts.quantized()
    up, down = (formats.get(fmt).stored(q[n].parts) for n in experts.weight_names())  # as an engine holds them
    table, scope = activation_table(experts.act_fn, CUDA), q[experts.up_name].scope
    assert torch.equal(trained, fast.stored_block(x, ids, weights, up, down, fmt, table, scope=scope))
    with torch.no_grad():
        assert torch.equal(trained, experts(x, ids, weights))


@pytest.mark.parametrize("k", [160, 2080, 17440])  # fewer steps than are in flight, and more than a chunk holds
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_no_bit_of_a_linear_depends_on_the_tile_or_the_shape(fmt: str, k: int) -> None:
    from swapq.kernels import fast
    from swapq.kernels.cuda import grouped_decode as decode
    from swapq.kernels.cuda.quantize import row_operand
    from swapq.kernels.cuda.tiles import dense_tiles

    w = swapq.quantize(sample("normal", 1, 416, k, seed=4), fmt).parts
    x = row_operand(sample("heavy tails", 70, k, seed=5), fmt)
    expected = fast._expanded(x, w, fmt, dense_tiles(70, 128), spread=False)
    shapes = {decode._shape_alone(n, 1) for n in (416, 1 << 20)}
    assert len(shapes) == 2
    for slots in (8, 16, 24, 32, 64):
        for shape in shapes:
            found = decode.grouped_decode(x, w, fmt, dense_tiles(70, slots), spread=False, shape=shape)
            assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), (slots, shape)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("rows", [1, 7, 40, 200, 300, 700])
def test_a_linear_has_the_same_bits_with_and_without_gradients_for_any_number_of_rows(
    fmt: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swapq.kernels.fast._PIECE_BYTES", 256 * 256 * 2)  # so the matrix is expanded in two pieces
    from swapq.kernels.routing import Routing
    from swapq.nn.functional import LinearSpec, TrainableExpertLinear
    from swapq.nn.linear import frozen_linear

    master = (sample("normal", 1, 416, 160, seed=4) * 0.05).requires_grad_()
    bias = sample("normal", 416, seed=6)
    x = sample("heavy tails", rows, 160, seed=5)
    q = swapq.quantize(master.detach()[0], fmt)
    trainable = TrainableExpertLinear(master, bias[None], LinearSpec(fmt, fmt, "dequantized"))
    trained = trainable(x, Routing.single(rows, CUDA), gather=False)
    assert trained.requires_grad
    assert torch.equal(trained, frozen_linear(x, q, bias, fmt))
    assert torch.equal(trained[:1], frozen_linear(x[:1], q, bias, fmt))
