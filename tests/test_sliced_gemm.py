"""Gradients of FP8 block with kernels, without a GPU: Triton's interpreter runs them in a process of its own, beside the definition."""

import pytest
import torch

from tests.helpers.triton_kernels import compiled, pointers
from tests.test_quantize_blocks import ROUNDING
from tests.test_stored_gemm import COMMON, interpreted

pytest.importorskip("triton")

GRADIENTS = """
from unittest.mock import patch

from swapq.kernels import sliced_gemm
from swapq.nn.functional import LinearSpec
from swapq.nn.low_precision import gradients_of
from swapq.qtensor import quantize

g, form, gradients = torch.Generator().manual_seed(0), formats.get("fp8_block"), gradients_of("fp8_block")

def tails(*shape):
    return (torch.randn(*shape, generator=g) * torch.exp(torch.randn(*shape, generator=g))).bfloat16()

def near(a, b, most):
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    error = float((a.float() - b.float()).norm() / b.float().norm())
    assert error < most, error

for n, k, experts, tokens, stacked, dtype in CASES:
    ids = torch.stack([torch.randperm(experts, generator=g)[:1] for _ in range(tokens)])
    ids[ids == 1] = 0  # nothing for the second expert
    routing = Routing.of(ids, experts)
    rows = sum(routing.counts)
    scope = form.scope_of_stack(n, stacked)
    master, x, dy = tails(experts, n, k), tails(rows, k), tails(rows, n)
    w, spec = quantize(master, "fp8_block", scope=scope), LinearSpec("fp8_block", "fp8_block", "low_precision")
    saved = gradients.save(x, master, w, routing)
    found = []
    for kernels in (lambda *_: False, lambda *_: True):
        type(gradients)._has_kernels = staticmethod(kernels)
        found.append((gradients.input_grad(saved, dy, routing, spec, scope), gradients.weight_grad(saved, dy, routing, dtype)))
    (dx, dw), (their_dx, their_dw) = found
    near(their_dx, dx, 2e-3)
    near(their_dw, dw, 2e-3 if dtype == torch.bfloat16 else 1e-6)
    with patch.object(sliced_gemm, "_ROWS", 128):  # an expert at a time
        assert torch.equal(gradients.weight_grad(saved, dy, routing, dtype), their_dw)
    assert experts == 1 or (their_dw[1] == 0).all()
print("fine")
"""
CASES = [
    (256, 128, 3, 40, 1, torch.float32),
    (160, 208, 2, 150, 1, torch.bfloat16),
    (192, 144, 3, 200, 2, torch.float32),
    (320, 64, 1, 300, 1, torch.float32),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "x".join(map(str, case[:3])))
def test_gradients_are_the_definitions_up_to_the_order_of_sums_whatever_the_edges(case: tuple[object, ...]) -> None:
    interpreted(f"CASES = [{case!r}]\n{ROUNDING}{COMMON}{GRADIENTS}".replace("CASES = [", "import torch\nCASES = [", 1))


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_kernel_of_weight_gradients_compiles(capability: int, dtype: str) -> None:
    from swapq.kernels import sliced_gemm

    tile_n, tile_k, rows = sliced_gemm._TILE_N, sliced_gemm._TILE_K, sliced_gemm._SLICE
    signature = {
        "dy": f"tensordesc<fp16[{rows},{tile_n}]>", "dy_scale": "*fp32", "x": f"tensordesc<fp16[{rows},{tile_k}]>", "x_scale": "*fp32",
        "slices": "*i32", "dw": f"*{dtype}", "first": "i32", "line": "i32", "N": "i32", "K": "i32",
    }  # fmt: skip
    constants = {"BN": tile_n, "BK": tile_k, "SLICE": rows}
    aligned = [*pointers(signature), "N", "K"]
    warps, stages = sliced_gemm._WARPS, sliced_gemm._STAGES
    built = compiled(sliced_gemm._kernel, signature, constants, capability, aligned, num_warps=warps, num_stages=stages)
    assert "cubin" in built.asm
    assert built.metadata.shared <= 227 << 10


def test_bytes_are_turned_as_torch_turns_them() -> None:
    script = """
import torch
from swapq.kernels.transpose import transposed

for shape in ((3, 192, 144), (2, 130, 77), (1, 1, 16)):
    x = torch.randint(0, 256, shape, dtype=torch.uint8)
    assert torch.equal(transposed(x), x.transpose(1, 2).contiguous())
print("fine")
"""
    interpreted(script)


def test_the_kernel_that_turns_bytes_moves_words_and_not_bytes() -> None:
    from swapq.kernels import transpose

    signature = {"x": "*u8", "out": "*u8", "N": "i32", "K": "i32", "DOWN": "i32", "ACROSS": "i32"}
    aligned = [*pointers(signature), "N", "K"]
    ptx = compiled(transpose._kernel, signature, {"B": transpose._TILE}, 90, aligned, num_warps=transpose._WARPS).asm[
        "ptx"
    ]
    assert "ld.global.v4" in ptx
    assert "st.global.v4" in ptx
