"""The Triton GEMM without a GPU: Triton's interpreter runs it on the CPU, in a process of its own (the switch is read at import)."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import torch
from swapq.kernels.cuda.quantize import RowOperand
from swapq.kernels.cuda.tiles import dense_tiles, tiles_of
from swapq.kernels.grouped_gemm import grouped_gemm
from swapq.kernels.routing import Routing
from swapq.nn.gate import activation_table

E, N, K, T, TOP = 3, 64, 128, 40, 2
g = torch.Generator().manual_seed(0)
w = torch.randn(E, N, K, generator=g).half()
w_scale, bias = torch.rand(E, generator=g), torch.randn(E, N, generator=g)
x = RowOperand(torch.randn(T, K, generator=g).half(), torch.rand(T, generator=g))
ids = torch.stack([torch.randperm(E + 1, generator=g)[:TOP] for _ in range(T)])  # one id of another rank
routing, table = Routing.of(ids, E), activation_table("silu", torch.device("cpu"))
tiles = tiles_of(routing, 32)
options = dict(config=(32, 32, 4, 2))

def expected(rows, gated, biased):
    out = []
    for expert, group in routing.groups():
        row = rows[group]
        acc = (x.values[row].double() @ w[expert].double().t()).float() * (x.scale[row] * w_scale[expert])[:, None]
        acc = acc + bias[expert] if biased else acc
        out.append(acc)
    y = torch.cat(out).bfloat16()
    if gated:
        gate, up = y.chunk(2, -1)
        y = table[gate.contiguous().view(torch.int16).int() + 32768] * up
    return y

def near(a, b):
    assert a.shape == b.shape, (a.shape, b.shape)
    assert float((a.float() - b.float()).abs().max() / b.float().abs().max()) < 0.02

for gated in (False, True):
    for biased in (False, True):
        more = dict(options, table=table if gated else None, bias=bias if biased else None)
        # sorted rows of tokens: the first linear of a trainer
        near(grouped_gemm(x, w, w_scale, tiles, spread=True, in_order=True, **more), expected(routing.tokens, gated, biased))

routed = RowOperand(x.values[routing.tokens], x.scale[routing.tokens])
near(grouped_gemm(routed, w, w_scale, tiles, spread=False, in_order=True, **options), expected(routing.tokens, False, False))

one = (x.values.double() @ w[1].double().t()).float()
dense = dense_tiles(T, 32)
near(grouped_gemm(RowOperand(x.values, None), w[1:2], None, dense, spread=False, **options), one.bfloat16())

wide = torch.zeros(T, 2 * N, dtype=torch.bfloat16)
grouped_gemm(RowOperand(x.values, None), w[1:2], None, dense, spread=False, out=wide[:, N:], **options)
near(wide[:, N:], one.bfloat16())
assert not wide[:, :N].any()
print("fine")
"""


def test_rows_are_the_reference_in_every_order_with_and_without_gate_and_bias() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip().endswith("fine"), done.stderr[-2000:]
