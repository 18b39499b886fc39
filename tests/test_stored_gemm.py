"""The Triton GEMM of FP8 block and INT4 without a GPU: Triton's interpreter runs it in a process of its own, beside the reference."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import numpy as np
import torch
from triton.runtime import interpreter

# Triton's interpreter holds BF16 numbers as their bits, and its product takes them for integers
plain = interpreter.InterpreterBuilder.create_dot

def dot(self, a, b, d, *rest):
    wide = [interpreter.TensorHandle((t.data.astype(np.uint32) << 16).view(np.float32), interpreter.tl.float32)
            if t.dtype.scalar == interpreter.tl.bfloat16 else t for t in (a, b)]
    return plain(self, *wide, d, *rest)

interpreter.InterpreterBuilder.create_dot = dot
from swapq import formats
from swapq.formats import Operand, Parts
from swapq.kernels import sliced, stored
from swapq.kernels.cuda.tiles import dense_tiles, tiles_of
from swapq.kernels.reference import grouped_forward
from swapq.kernels.routing import Routing

E, T, TOP = 3, 40, 2
g = torch.Generator().manual_seed(0)
bf16 = lambda *s: torch.randn(*s, generator=g).bfloat16()
ids = torch.stack([torch.randperm(E + 1, generator=g)[:TOP] for _ in range(T)])  # one id of another rank
routing = Routing.of(ids, E)

def near(a, b):
    assert a.shape == b.shape, (a.shape, b.shape)
    error = float((a.float() - b.float()).norm() / b.float().norm())
    assert error < 8e-3, error  # the interpreter cuts where a GPU rounds to BF16

def expected(x, parts, fmt, scope, bias):
    form = formats.get(fmt)
    w = form.operand(parts, scope=scope)
    if fmt == "fp8_block":
        rows = form.operand(form.quantize(x, scope="row"), scope="row")
        y = sliced.grouped_forward(Operand(rows.values[routing.tokens], rows.scale[routing.tokens]), w, routing,
                                   sliced.spans(x.shape[1], 128))
    else:
        y = grouped_forward(x[routing.tokens], w.values, routing).float()
    if bias is not None:
        y = y + bias.bfloat16().float().repeat_interleave(torch.tensor(routing.counts), 0)
    return y.bfloat16()

for fmt, n, k, scope in CASES:
    form = formats.get(fmt)
    w = bf16(E, n, k) * torch.exp(2 * torch.randn(E, n, 1, generator=g)).bfloat16()
    parts, x, bias = form.quantize(w, scope=scope), bf16(T, k), torch.randn(E, n, generator=g)
    for b in (None, bias):
        want = expected(x, parts, fmt, scope, b)
        near(stored.routed_rows(x, parts, fmt, scope, b, routing, gather=True), want)
        near(stored.routed_rows(x[routing.tokens], parts, fmt, scope, b, routing, gather=False), want)
    packed = form.stored(parts)  # as an engine holds it
    assert torch.equal(stored.routed_rows(x, packed, fmt, scope, None, routing, gather=True),
                       stored.routed_rows(x, parts, fmt, scope, None, routing, gather=True))
    one = Parts(parts.codes[1], parts.scales[1])
    dense = stored.dense_linear(x, one, fmt, None, scope=scope)
    mine = [r for e, r in routing.groups() if e == 1][0]
    assert torch.equal(dense[routing.tokens[mine]], stored.routed_rows(x, parts, fmt, scope, None, routing, gather=True)[mine])
    assert torch.equal(stored.dense_linear(x[3], one, fmt, None, scope=scope), dense[3])
print("fine")
"""

CASES = {
    "fp8_block": [("fp8_block", 256, 256, "tile"), ("fp8_block", 160, 200, "tile"), ("fp8_block", 192, 144, "halves")],
    "int4": [("int4", 96, 256, "group"), ("int4_g32", 130, 96, "group")],
}


@pytest.mark.parametrize("kind", list(CASES))
def test_rows_are_the_reference_up_to_the_order_of_sums_whatever_the_edges(kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"CASES = {CASES[kind]!r}\n{SCRIPT}"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip().endswith("fine"), done.stderr[-2500:]
