"""The Triton dequantizers of FP8 block and INT4 without a GPU: Triton's interpreter runs them in a process of its own."""

import pytest
import torch

from swapq import formats
from swapq.formats import Parts
from swapq.nn.expert_block import row_parts, row_values
from tests.test_quantize_blocks import ROUNDING, ptx_of
from tests.test_stored_gemm import interpreted

pytest.importorskip("triton")

#: format, scope and axis of what has a kernel
CASES = [
    ("fp8_block", "tile", -1),
    ("fp8_block", "halves", -1),
    ("fp8_block", "row", -1),
    ("fp8_block", "row", -2),
    ("int4", "group", -1),
    ("int4_g32", "group", -1),
]

BYTES = """
from hypothesis import given, settings
from hypothesis import strategies as st

from swapq import formats
from swapq.formats import Parts
from swapq.kernels import dequantize_blocks

INT4 = FORMAT != "fp8_block"
form = formats.get(FORMAT)

def parts_of(shape, seed):
    g = torch.Generator().manual_seed(seed)
    shapes = form.part_shapes(shape, scope=SCOPE, axis=AXIS)
    if INT4:
        codes = torch.randint(-128, 128, shape, generator=g, dtype=torch.int8)
    else:
        codes = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn)
    # scales as checkpoints of others may have them: products beyond float32 at both ends
    scales = torch.randn(shapes["scales"], generator=g) * torch.exp(30 * torch.randn(shapes["scales"], generator=g))
    if seed % 3 == 0:
        scales.view(-1)[seed % scales.numel()] = (float("nan"), float("inf"), 0.0)[seed // 3 % 3]
    return Parts(codes, scales.to(form.dtypes["scales"]))

def found(parts):
    return dequantize_blocks.dequantize_int4(parts, FORMAT) if INT4 else dequantize_blocks.dequantize_squares(parts, SCOPE, AXIS)

def same(parts):
    with np.errstate(all="ignore"):
        ours = found(parts)
    expected = form.dequantize(parts, scope=SCOPE, axis=AXIS).to(torch.bfloat16)
    assert ours.shape == expected.shape and ours.dtype == expected.dtype and ours.is_contiguous()
    # a CPU writes NaN in several ways, a GPU in one
    assert torch.equal(ours.isnan(), expected.isnan())
    bits = [torch.where(x.isnan(), 0.0, x).view(torch.int16) for x in (ours, expected)]
    assert torch.equal(*bits)
    return ours

def lengths():
    k = st.integers(1, 3 if INT4 else 300).map(lambda k: k * form.block if INT4 else k)
    rows = st.integers(1, 150).map(lambda n: n + n % 2 if SCOPE == "halves" else n)
    lead = st.lists(st.integers(1, 3), max_size=2)
    shapes = st.tuples(lead, rows, k).map(lambda s: (*s[0], *s[1:]))
    return shapes | st.tuples(k) if ONE_DIM else shapes

@settings(max_examples=20, deadline=None, database=None, derandomize=True)
@given(lengths(), st.integers(0, 1000))
def any_shape(shape, seed):
    same(parts_of(shape, seed))

any_shape()
parts = parts_of((2, 144, 256), 1)
values = same(parts)
if not INT4:
    nan = (parts.codes.view(torch.uint8) & 127) == 127
    assert nan.any() and torch.equal(same(parts._replace(scales=torch.ones_like(parts.scales))).isnan(), nan)
views = Parts(*(t.view(torch.uint8).repeat_interleave(2, -2).view(t.dtype)[..., ::2, :] for t in parts[:2]))
assert not views.codes.is_contiguous() and not views.scales.is_contiguous()
assert torch.equal(same(views).view(torch.int16), values.view(torch.int16))
print("fine")
"""

# Nothing is read or written that is not named below: what a process never touched of these tensors costs no memory.
FAR = """
from swapq.kernels.dequantize_blocks import _squares

interpreter.GridExecutor._restore_args_dev = lambda *_: None  # it would copy whole tensors onto themselves
N, K = 128, 1 << 25
codes, out = torch.empty(N, K, dtype=torch.uint8), torch.empty(N, K, dtype=torch.bfloat16)
assert codes.numel() > 2**31
g = torch.Generator().manual_seed(0)
codes[:, :128] = torch.randint(0, 120, (N, 128), generator=g, dtype=torch.uint8)
scales = torch.empty(N, K // 128)
scales[:, 0] = torch.rand(N, generator=g)
_squares[(1,)](codes, scales, out, N, K, 1, K // 128, ROWS=True, COLUMNS=False, B=128)
expected = codes[:, :128].view(torch.float8_e4m3fn).float() * scales[:, :1]
assert torch.equal(out[:, :128], expected.to(torch.bfloat16))
print("fine")
"""


@pytest.mark.parametrize(("fmt", "scope", "axis"), CASES)
def test_a_dequantizer_writes_the_bytes_of_the_definition_whatever_the_shape(fmt: str, scope: str, axis: int) -> None:
    one_dim = scope in ("row", "group") and axis == -1
    setting = f"FORMAT, SCOPE, AXIS, ONE_DIM = {fmt!r}, {scope!r}, {axis!r}, {one_dim!r}"
    interpreted(f"{setting}\n{ROUNDING}{BYTES}")


def test_elements_are_found_beyond_two_to_the_31() -> None:
    interpreted(f"{ROUNDING}{FAR}")


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("kind", ["tile", "row", "column"])
def test_the_dequantizer_of_squares_compiles_and_moves_sixteen_bytes_at_a_time(capability: int, kind: str) -> None:
    from swapq.kernels import dequantize_blocks as d

    signature = {
        "codes": "*u8",
        "scales": "*fp32",
        "out": "*bf16",
        "N": "i32",
        "K": "i32",
        "DOWN": "i32",
        "ACROSS": "i32",
    }
    constants = {"ROWS": kind == "row", "COLUMNS": kind == "column", "B": d.BLOCK}
    ptx = ptx_of(d._squares, signature, constants, capability, warps=8, lengths=("K",))
    assert "mul.rn.f32" in ptx or "mul.f32" in ptx
    assert "cvt.rn.bf16" in ptx
    assert "fma" not in ptx  # one rounding a line of the contract
    assert ".ftz" not in ptx
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("group", [32, 128])
def test_the_dequantizer_of_int4_compiles_and_moves_sixteen_bytes_at_a_time(capability: int, group: int) -> None:
    from swapq.kernels import dequantize_blocks as d

    signature = {"codes": "*i8", "scales": "*bf16", "out": "*bf16", "GROUPS": "i32"}
    constants = {"G": group, "B": d._VALUES // group}
    ptx = ptx_of(d._int4, signature, constants, capability, warps=4)
    # both factors fit BF16, so a product rounded to BF16 at once has the same bits
    assert "mul.rn.f32" in ptx or "mul.f32" in ptx or "mul.rn.bf16" in ptx
    assert "fma.rn.f32" not in ptx
    assert ".ftz" not in ptx
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What the dispatch asks of the kernels, as on a Hopper GPU."""
    from swapq.kernels import dequantize_blocks, dispatch

    asked: list[tuple[object, ...]] = []

    def note(parts: Parts, *how: object) -> torch.Tensor:
        asked.append(how)
        return torch.empty(parts.codes.shape, dtype=torch.bfloat16, device=parts.codes.device)

    monkeypatch.setattr(dispatch, "kernels", lambda _: True)
    monkeypatch.setattr(dequantize_blocks, "dequantize_squares", note)
    monkeypatch.setattr(dequantize_blocks, "dequantize_int4", note)
    return asked


def parts_of(fmt: str, shape: tuple[int, ...], scope: str, axis: int = -1) -> Parts:
    """As ``Format.quantize`` gives them, without memory."""
    form = formats.get(fmt)
    codes = torch.int8 if fmt.startswith("int4") else form.dtypes["codes"]
    scales = form.part_shapes(shape, scope=scope, axis=axis)["scales"]
    return Parts(
        torch.empty(shape, dtype=codes, device="meta"),
        torch.empty(scales, dtype=form.dtypes["scales"], device="meta"),
    )


def test_what_has_no_kernel_is_left_to_the_definition(asked: list[tuple[object, ...]]) -> None:
    from swapq.kernels import dispatch

    for fmt, scope, axis in CASES:
        values = dispatch.dequantize(parts_of(fmt, (2, 64, 256), scope, axis), fmt, scope, axis)
        assert values is not None
        assert (values.shape, values.dtype) == ((2, 64, 256), torch.bfloat16)
        assert dispatch.dequantize(parts_of(fmt, (0, 64, 256), scope, axis), fmt, scope, axis) is None
    assert asked == [("tile", -1), ("halves", -1), ("row", -1), ("row", -2), ("int4",), ("int4_g32",)]
    assert dispatch.dequantize(parts_of("fp8_block", (200,), "row"), "fp8_block", "row", -1) is not None
    assert dispatch.dequantize(parts_of("fp8_block", (200,), "row"), "fp8_block", "tile", -1) is None


def test_parts_that_no_quantizer_writes_are_left_to_the_definition(asked: list[tuple[object, ...]]) -> None:
    from swapq.kernels import dispatch

    def is_left(parts: Parts, fmt: str, scope: str, axis: int = -1) -> bool:
        return dispatch.dequantize(parts, fmt, scope, axis) is None

    squares, groups = parts_of("fp8_block", (2, 256, 256), "tile"), parts_of("int4", (2, 64, 256), "group")
    assert is_left(squares._replace(scales=squares.scales[:1]), "fp8_block", "tile")
    assert is_left(squares._replace(scales=squares.scales.bfloat16()), "fp8_block", "tile")
    assert is_left(squares, "fp8_block", "tile", -2)
    assert is_left(parts_of("fp8_block", (257, 256), "halves"), "fp8_block", "halves")
    assert is_left(groups._replace(codes=groups.codes.view(torch.uint8)), "int4", "group")  # two codes a byte
    assert is_left(groups._replace(scales=groups.scales.float()), "int4", "group")
    assert is_left(groups._replace(codes=groups.codes[..., :-64]), "int4", "group")
    assert is_left(parts_of("int4", (64, 200), "group"), "int4", "group")
    assert asked == []


def test_backward_reads_rows_and_weights_through_the_kernels(asked: list[tuple[object, ...]]) -> None:
    from swapq.qtensor import QTensor

    for slices in (1, 2):
        rows = parts_of("fp8_block", (9, 512) if slices == 1 else (9, 2, 256), "row")
        assert row_values(rows, "fp8_block", slices).shape == (9, 512)
    for fmt, scope in (("fp8_block", "tile"), ("int4_g32", "group")):
        weight = parts_of(fmt, (2, 64, 256), scope)
        assert QTensor(*weight[:2], fmt, scope).dequantize(torch.bfloat16).shape == (2, 64, 256)
    assert asked == [("row", -1), ("row", -1), ("tile", -1), ("int4_g32",)]


@pytest.mark.parametrize("slices", [1, 2])
def test_rows_in_slices_have_the_values_of_the_definition(slices: int) -> None:
    x = torch.randn(5, 512).bfloat16()
    parts = row_parts(x, "fp8_block", slices)
    expected = formats.get("fp8_block").dequantize(parts, scope="row").to(torch.bfloat16).view(5, 512)
    assert torch.equal(row_values(parts, "fp8_block", slices), expected)
