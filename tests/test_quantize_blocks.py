"""The Triton quantizers of FP8 block and INT4 without a GPU: Triton's interpreter runs them in a process of its own."""

import pytest
import torch

from tests.helpers.triton_kernels import compiled, pointers
from tests.test_stored_gemm import interpreted

pytest.importorskip("triton")

# The interpreter cuts what a GPU rounds to nearest even, has numbers where E4M3 has NaN, and zeros where BF16 is subnormal.
ROUNDING = """
import numpy as np
import torch
from triton.runtime import interpreter

exactly = interpreter._convert_float
narrow = {interpreter.tl.bfloat16: (torch.bfloat16, torch.int16), interpreter.tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8)}

def convert(x, source, target, rounding):
    x = torch.from_numpy(np.ascontiguousarray(x))
    if target == interpreter.tl.float32 and source in narrow:
        return x.view(narrow[source][0]).float().numpy()
    if source != interpreter.tl.float32 or target not in narrow:
        return exactly(x.numpy(), source, target, rounding)
    dtype, bits = narrow[target]
    return x.view(torch.float32).to(dtype).view(bits).numpy()

interpreter._convert_float = convert
"""

QUANTIZED = """
from swapq import formats
from swapq.kernels import quantize_blocks

g = torch.Generator().manual_seed(0)

def sample(kind, *shape):
    x = torch.randn(*shape, generator=g)
    if kind == "heavy tails":
        x = x * torch.exp(4 * torch.randn(*shape, generator=g))
    if kind == "patterns":
        bits = torch.randint(-32768, 32768, shape, generator=g, dtype=torch.int32).to(torch.int16)
        x = bits.view(torch.bfloat16).float()
        x = torch.where(x.isfinite(), x, 0.0)
    if kind == "tiny":
        x = x * 1e-12
    if kind == "sparse":
        x = x * (torch.rand(*shape, generator=g) < 0.01)
    return x.bfloat16()

def same(a, b):
    for x, y in zip(a, b, strict=True):
        if x is not None or y is not None:
            assert x.shape == y.shape and x.dtype == y.dtype, (x.shape, y.shape)
            assert int((x.view(torch.uint8) != y.view(torch.uint8)).sum()) == 0

for kind in ("normal", "heavy tails", "patterns", "tiny", "sparse"):
    x = sample(kind, *SHAPE)
    form = formats.get(FORMAT)
    if FORMAT != "fp8_block":
        same(quantize_blocks.quantize_int4(x, FORMAT), form.quantize(x))
        continue
    for scope, axis in (("tile", -1), ("halves", -1), ("row", -2)):
        same(quantize_blocks.quantize_squares(x, scope, axis), form.quantize(x, scope=scope, axis=axis))
    for bad in (float("nan"), float("inf")):
        x[..., 3, 5] = bad
        found = form.dequantize(quantize_blocks.quantize_squares(x, "tile", -1))
        assert not found[..., 3, 5].isfinite().any()
print("fine")
"""

GROUPS = """
from swapq.kernels.routing import Routing

for counts in ((130, 0, 128, 1), (0, 0, 300), (5,)):
    routing = Routing(torch.arange(sum(counts)), counts, sum(counts), 1)
    x = sample("heavy tails", sum(counts), 208)
    padded = routing.pad_rows(x, 128)[1]
    same(quantize_blocks.quantize_columns_of_groups(x, routing), form.quantize(padded, scope="row", axis=-2))
print("fine")
"""


def test_columns_of_groups_have_the_bytes_of_padded_groups() -> None:
    interpreted(f"FORMAT, SHAPE = 'fp8_block', (32, 32)\n{ROUNDING}{QUANTIZED}{GROUPS}")


@pytest.mark.parametrize(
    ("fmt", "shape"),
    [("fp8_block", (2, 144, 208)), ("fp8_block", (256, 128)), ("int4", (3, 40, 256)), ("int4_g32", (70, 96))],
)
def test_a_quantizer_writes_the_bytes_of_the_definition(fmt: str, shape: tuple[int, ...]) -> None:
    interpreted(f"FORMAT, SHAPE = {fmt!r}, {shape!r}\n{ROUNDING}{QUANTIZED}")


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("columns", [False, True])
def test_the_quantizer_of_squares_compiles_and_rounds_to_nearest_even(capability: int, columns: bool) -> None:
    from swapq.kernels import quantize_blocks as q

    signature = {
        "x": "*i16",
        "codes": "*fp8e4nv",
        "scales": "*fp32",
        "N": "i32",
        "K": "i32",
        "DOWN": "i32",
        "ACROSS": "i32",
    }
    constants = {"COLUMNS": columns, "FLOOR": q.FLOOR, "MOST": q.E4M3_MAX, "B": q.BLOCK}
    ptx = ptx_of(q._squares, signature, constants, capability, warps=8)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "div.rn.f32" in ptx
    assert "fma" not in ptx  # one rounding a line of the contract


@pytest.mark.parametrize("capability", [90, 100])
def test_the_quantizer_of_groups_compiles(capability: int) -> None:
    from swapq.kernels import quantize_blocks as q

    signature = {
        "x": "*i16",
        "pieces": "*i32",
        "codes": "*fp8e4nv",
        "scales": "*fp32",
        "PIECES": "i32",
        "K": "i32",
        "ACROSS": "i32",
    }
    constants = {"FLOOR": q.FLOOR, "MOST": q.E4M3_MAX, "B": q.BLOCK}
    ptx = ptx_of(q._columns_of_groups, signature, constants, capability, warps=8, lengths=("K",))
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "fma" not in ptx


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("group", [32, 128])
def test_the_quantizer_of_int4_compiles_and_rounds_to_nearest_even(capability: int, group: int) -> None:
    from swapq.kernels import quantize_blocks as q

    signature = {"x": "*i16", "codes": "*i8", "scales": "*bf16", "GROUPS": "i32"}
    constants = {"G": group, "SEVENTH": q.ONE_SEVENTH, "FLOOR": q.INT4_FLOOR, "MOST": q.TOP, "B": q._GROUPS}
    ptx = ptx_of(q._int4, signature, constants, capability, warps=4)
    assert "cvt.rn.bf16" in ptx
    assert "div.rn.f32" in ptx
    assert "add.f32" in ptx or "add.rn.f32" in ptx


def ptx_of(
    kernel: object,
    signature: dict[str, str],
    constants: dict[str, object],
    capability: int,
    warps: int,
    lengths: tuple[str, ...] = (),
) -> str:
    """PTX for tensors, and ``lengths``, that are multiples of 16."""
    aligned = [*pointers(signature), *lengths]
    built = compiled(kernel, signature, constants, capability, aligned, num_warps=warps, enable_fp_fusion=False)
    return built.asm["ptx"]


def test_what_has_no_kernel_is_left_to_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    from swapq.kernels import dispatch, quantize_blocks

    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(dispatch, "kernels", lambda _: True)
    monkeypatch.setattr(quantize_blocks, "quantize_squares", lambda x, *how: seen.append(how))
    monkeypatch.setattr(quantize_blocks, "quantize_int4", lambda x, *how: seen.append(how))
    x = torch.empty(2, 64, 256, dtype=torch.bfloat16, device="meta")
    for fmt, scope, axis in (
        ("fp8_block", "tile", -1),
        ("fp8_block", "halves", -1),
        ("fp8_block", "row", -2),
        ("fp8_block", "row", -1),
        ("int4_g32", "group", -1),
        ("nvfp4_tile", "tile", -1),
    ):
        dispatch.quantize(x, fmt, scope, axis, None)
    assert seen == [("tile", -1), ("halves", -1), ("row", -2), ("int4_g32",)]
