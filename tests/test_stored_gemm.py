"""The Triton GEMM of FP8 block and INT4 without a GPU: Triton's interpreter runs it in a process of its own, beside the reference."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.helpers import ptx

pytest.importorskip("triton")

COMMON = """
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

from tests.helpers import ptx

# Four codes in a word, as a GPU packs them; the text is the kernel's
class Outputs(list):
    get_result = list.__getitem__

def inline_asm(self, text, constraints, values, types, pure, pack):
    (codes,), (outputs, inputs) = values, (constraints.count("=r"), constraints.count(",r"))
    assert (outputs, inputs, pack, codes.data.dtype) == (2 * len(types), 1, 4, np.uint8)
    words = ptx.run(text, [np.ascontiguousarray(codes.data).reshape(-1).view(np.uint32)], outputs)
    pairs = [np.stack(words[i:i + 2], 1).view(np.uint16).reshape(codes.data.shape) for i in range(0, outputs, 2)]
    return Outputs(interpreter.TensorHandle(p, interpreter.tl.bfloat16) for p in pairs)

interpreter.InterpreterBuilder.create_inline_asm = inline_asm
from swapq import formats
from swapq.formats import Operand, Parts
from swapq.kernels import sliced, stored
from swapq.kernels.cuda.tiles import dense_tiles, tiles_of
from swapq.kernels.reference import grouped_forward
from swapq.kernels.routing import Routing

# rows come from a CUDA kernel, which tests/gpu compares with these
def row_operand(x, fmt, *, table=None):
    parts = formats.get("fp8_block").quantize(x, scope="row")
    return parts.codes.to(torch.float16), parts.scales

stored.row_operand = row_operand

"""

EDGES = """
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
    assert stored.dense_linear(x[:0], one, fmt, bias[1], scope=scope).shape == (0, n)
    # a view that is neither contiguous nor at sixteen bytes, and codes of a transposed master
    odd = torch.empty(T, k + 3, dtype=torch.bfloat16)[:, 1:k + 1].copy_(x)
    assert torch.equal(stored.dense_linear(odd, one, fmt, None, scope=scope), dense)
    turned = form.quantize(w.transpose(1, 2).contiguous().transpose(1, 2), scope=scope)
    assert torch.equal(stored.dense_linear(x, Parts(turned.codes[1], turned.scales[1]), fmt, None, scope=scope), dense)
    whole = stored.routed_rows(x, parts, fmt, scope, None, routing, gather=True)
    for tokens in (0, 1, 3):  # some of them with ids of another rank alone
        part = ids[:tokens].clone()
        part[2:] = E
        few = Routing.of(part, E)
        got = stored.routed_rows(x[:tokens], packed, fmt, scope, None, few, gather=True)
        place = {int(s): i for i, s in enumerate(routing.slots)}
        assert torch.equal(got, whole[[place[int(s)] for s in few.slots]])
    if fmt == "fp8_block":  # as a merged linear holds them: one row of scales per row of the weight
        wide = form.row_scales(one.scales, n, scope)
        assert torch.equal(stored.dense_linear(x, Parts(one.codes, wide), fmt, None), dense)
print("fine")
"""

CASES = {
    "fp8_block": [("fp8_block", 256, 256, "tile"), ("fp8_block", 160, 200, "tile"), ("fp8_block", 192, 144, "halves")],
    "int4": [("int4", 96, 256, "group"), ("int4_g32", 130, 96, "group"), ("int4_g32", 64, 160, "group")],
}

SHAPES = """
from swapq.kernels.stored_gemm import Shape, stored_gemm

g = torch.Generator().manual_seed(1)
E, T, TOP = 3, 21, 2
ids = torch.stack([torch.randperm(E, generator=g)[:TOP] for _ in range(T)])
routing = Routing.of(ids, E)
for fmt, n, k, scope in CASES:
    form = formats.get(fmt)
    packed = form.stored(form.quantize(torch.randn(E, n, k, generator=g).bfloat16(), scope=scope))
    x = stored._rows(torch.randn(T, k, generator=g).bfloat16(), fmt)
    scales = packed.scales.contiguous()
    codes = packed.codes.contiguous().view(torch.uint8)
    rows = None if fmt.startswith("int4") else stored._scale_rows(n, scales.shape[-2], scope, codes.device)
    bias = torch.randn(E, n, generator=g)

    def product(tile, shape):
        tiles = tiles_of(routing, tile)
        return stored_gemm(x, codes, scales, tiles, spread=True, group=0 if rows is not None else form.block, scale_row=rows,
                           in_order=True, bias=bias, shape=shape)

    usual = product(64, None).float()
    for tile in (16, 32, 64):
        for shape in (Shape(), Shape(columns=64), Shape(left=True), Shape(columns=64, left=True)):
            other = product(tile, shape).float()
            error = float((other - usual).norm() / usual.norm())
            assert error < 3e-3, (fmt, tile, shape, error)  # on a GPU the bits are equal; here sums are NumPy's
print("fine")
"""

# Rows of the unit matrix pick values of a weight one by one.
VALUES = """
every = torch.arange(256, dtype=torch.uint8)  # -8 too, which no quantizer of ours writes
for fmt, k in (("int4", 512), ("int4_g32", 512), ("int4_g32", 480)):
    form = formats.get(fmt)
    packed = Parts(torch.stack([every.roll(i)[:k // 2] for i in range(256)]), torch.randn(256, k // form.block).bfloat16())
    found = stored.dense_linear(torch.eye(k).bfloat16(), packed, fmt, None)
    expected = form.operand(form.loaded(packed)).values
    assert expected.unique().numel() > 1000
    if not torch.equal(found.T, expected):  # the interpreter cuts where a GPU rounds to BF16
        cut = (form.loaded(packed).codes.float() * form._spread(packed.scales)).view(torch.int32) & -65536
        assert torch.equal(found.T.float(), cut.view(torch.float32))
print("fine")
"""

# Nothing is read or written that is not named below: what a process never touched of these tensors costs no memory.
FAR = """
from swapq.kernels.cuda.tiles import Tiles
from swapq.kernels.stored_gemm import stored_gemm

interpreter.GridExecutor._restore_args_dev = lambda *_: None  # it would copy whole tensors onto themselves
N, K, EXPERTS, SLOTS = 256, 256, 1 << 17, 9_000_000
g = torch.Generator().manual_seed(0)
packed = GROUP > 0
codes = torch.empty(EXPERTS, N, K // 2 if packed else K, dtype=torch.uint8)
scales = torch.empty(EXPERTS, N, K // GROUP, dtype=torch.bfloat16) if packed else torch.empty(EXPERTS, 2, 2)
values = torch.empty(SLOTS, K, dtype=torch.bfloat16 if packed else torch.float16)
x_scale = None if packed else torch.empty(SLOTS, 2)
assert min(t.numel() for t in (codes, values)) > 2**31
expert, far = EXPERTS - 1, torch.tensor([SLOTS - 1, SLOTS - 7], dtype=torch.int32)
codes[expert] = torch.randint(0, 120, codes[expert].shape, generator=g, dtype=torch.uint8)
scales[expert] = torch.rand(scales[expert].shape, generator=g).to(scales.dtype)
values[far] = torch.randn(2, K, generator=g).to(values.dtype)
if x_scale is not None:
    x_scale[far] = torch.rand(2, 2, generator=g)
near = torch.arange(2, dtype=torch.int32)
rows = torch.arange(N, dtype=torch.int32) // 128

def product(x, s, codes, scales, slots, at, rows_out):
    table = torch.tensor([1, at, 0, 2], dtype=torch.int32)
    tiles = Tiles(slots, table, 1, 64, 1, rows_out)
    return stored_gemm(Operand(x, s), codes, scales, tiles, spread=True, group=GROUP, scale_row=None if packed else rows)

found = product(values, x_scale, codes, scales, far, expert, SLOTS)[far]
short = product(values[far], None if packed else x_scale[far], codes[expert:], scales[expert:], near, 0, 2)
assert torch.equal(found, short) and short.float().abs().max() > 1
print("fine")
"""


def interpreted(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip().endswith("fine"), done.stderr[-2500:]


@pytest.mark.parametrize("kind", list(CASES))
def test_rows_are_the_reference_up_to_the_order_of_sums_whatever_the_edges(kind: str) -> None:
    interpreted(f"CASES = {CASES[kind]!r}\n{COMMON}{EDGES}")


@pytest.mark.parametrize("kind", list(CASES))
def test_every_shape_of_blocks_computes_the_same_product(kind: str) -> None:
    interpreted(f"CASES = {CASES[kind]!r}\n{COMMON}{SHAPES}")


@pytest.mark.parametrize("group", [0, 32])
def test_experts_and_rows_are_found_beyond_two_to_the_31(group: int) -> None:
    interpreted(f"GROUP = {group}\n{COMMON}{FAR}")


def test_every_byte_of_int4_codes_at_every_place_of_a_weight_has_its_value() -> None:
    interpreted(f"{COMMON}{VALUES}")


def test_the_assembly_of_int4_gives_the_bits_of_every_code_at_every_place_of_a_word() -> None:
    from swapq.formats import Parts
    from swapq.formats.int4 import INT4
    from swapq.kernels.stored_gemm import _int4_values

    text, constraints = re.findall(
        r'"""(.*?)"""|"(=r[^"]*)"', _int4_values.src.split("inline_asm_elementwise")[1], re.S
    )
    assert constraints[1] == "=r,=r,=r,=r,r"
    every = torch.arange(256, dtype=torch.uint8)
    words = torch.stack([every.roll(i) for i in (0, 3, 101, 250)], 1)
    outputs = ptx.run(text[0], [words.numpy().view(np.uint32).ravel()], 4)
    low, high = (np.stack(outputs[i : i + 2], 1).view(np.int16) for i in (0, 2))
    codes = INT4().loaded(Parts(words, torch.empty(0))).codes
    assert codes.min() == -8
    expected = codes.to(torch.bfloat16).view(torch.int16)  # zeros have no sign
    assert (torch.from_numpy(np.stack((low, high), 2)).flatten(1) == expected).all()
