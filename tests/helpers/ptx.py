"""The few PTX instructions of inline assembly in Triton kernels, on NumPy arrays: the kernel's own text runs without a GPU."""

import re
from collections.abc import Callable

import numpy as np

Words = np.ndarray


def run(text: str, inputs: list[Words], outputs: int) -> list[Words]:
    """uint32 ``outputs`` of the assembly ``text``: operands ``$0``, ``$1``.. are they, then come the ``inputs``."""
    values = {f"${outputs + i}": words for i, words in enumerate(inputs)}
    for line in re.split(r"[;{}]", text):
        if not line.split() or line.split()[0].startswith(".reg"):
            continue
        name, operands = line.split(maxsplit=1)
        to, *sources = (o.strip() for o in operands.split(","))
        values[to] = INSTRUCTIONS[name](*(values[s] if s in values else np.uint32(int(s, 0)) for s in sources))
    return [values[f"${i}"] for i in range(outputs)]


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    out = a & b & c & np.uint32(0)
    for row in range(8):  # of the truth table: bits of a, b and c
        if int(table) >> row & 1:
            out = out | ((a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c))
    return out


def _prmt(a: Words, b: Words, selectors: Words) -> Words:
    out = (a ^ a) & b
    for i in range(4):
        choice = int(selectors) >> 4 * i & 0xF
        assert choice < 8, "the sign of a byte is not spread here"
        out = out | ((a, b)[choice // 4] >> np.uint32(8 * (choice % 4)) & np.uint32(0xFF)) << np.uint32(8 * i)
    return out


def _bf16_sub(a: Words, b: Words) -> Words:
    out = (a ^ a) & b
    for half in (0, 16):
        x, y = (((w >> np.uint32(half)) << np.uint32(16)).view(np.float32) for w in (a, b))
        bits = (x - y).view(np.uint32)
        assert not (bits & np.uint32(0xFFFF)).any(), "a difference that BF16 would round"
        out = out | (bits >> np.uint32(16)) << np.uint32(half)
    return out


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "lop3.b32": _lop3,
    "shr.b32": lambda a, by: a >> by,  # of type b: zeros come in
    "prmt.b32": _prmt,
    "sub.rn.bf16x2": _bf16_sub,
}
