"""Every byte against a NumPy implementation of the contract: all BF16 numbers, exact ties and their neighbours, dead blocks, NaN."""

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import swapq
from swapq.formats import mxfp8, nvfp4
from swapq.kernels.cpu import quantize_matrix
from tests.helpers import contract_bytes as contract

F, K = np.float32, 512


def bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(F)


def every_bf16(rng: np.random.Generator, *, shuffled: bool) -> np.ndarray:
    """All finite BF16 numbers, in order (a block holds neighbours) or shuffled (a block spans all magnitudes)."""
    bits = np.arange(65536)
    bits = bits[np.isfinite(bf16(bits))]
    bits = rng.permutation(bits) if shuffled else bits
    return bf16(np.concatenate((bits, bits[: -len(bits) % K]))).reshape(-1, K)


def near(rng: np.random.Generator, mantissa_bits: int) -> np.ndarray:
    """Rows of any magnitude whose elements lie within 14 powers of two, all mantissas."""
    shape = (400, K)
    exponent = np.clip(rng.integers(0, 255, (shape[0], 1)) - rng.integers(0, 14, shape), 0, 254)
    mantissa = rng.integers(0, 1 << mantissa_bits, shape) << (23 - mantissa_bits)
    return (rng.integers(0, 2, shape) << 31 | exponent << 23 | mantissa).astype(np.uint32).view(F)


def ties(rng: np.random.Generator, table: np.ndarray) -> np.ndarray:
    """Exact values and midpoints of an element type and their float32 neighbours, in rows of many powers of two."""
    exact = np.concatenate((table, (table[1:] + table[:-1]) / 2)).astype(F)
    around = np.concatenate((exact, np.nextafter(exact, F(0)), np.nextafter(exact, F(np.inf))))
    x = rng.choice(np.concatenate((around, -around)), (400, K))
    x[:, ::16] = table[-1]
    return (x * np.exp2(rng.integers(-60, 60, (400, 1)))).astype(F)


def scale_edges(rng: np.random.Generator) -> np.ndarray:
    """Blocks whose amax is 448 times a power of two, or its float32 neighbour: where the E8M0 byte steps."""
    x = near(rng, 23) * F(0)
    top = (F(448) * np.exp2(rng.integers(-100, 100, (400, K // 32)))).astype(F)
    step = rng.integers(-2, 3, top.shape)
    x[:, ::32] = (top.view(np.int32) + step).astype(np.int32).view(F)
    return x


def sparse(rng: np.random.Generator) -> np.ndarray:
    x = near(rng, 7)
    x[rng.random(x.shape) < 0.4] = 0
    blocks = x.reshape(len(x), -1, 16)
    blocks[rng.random(blocks.shape[:2]) < 0.3] = -0.0
    return x


SETS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "every BF16 in order": lambda rng: every_bf16(rng, shuffled=False),
    "every BF16 shuffled": lambda rng: every_bf16(rng, shuffled=True),
    "BF16 of near exponents": lambda rng: near(rng, 7),
    "FP32 of near exponents": lambda rng: near(rng, 23),
    "FP16 mantissas": lambda rng: near(rng, 10),
    "ties of E2M1": lambda rng: ties(rng, contract.E2M1),
    "ties of E4M3": lambda rng: ties(rng, contract.E4M3),
    "edges of the E8M0 scale": scale_edges,
    "zeros of both signs": sparse,
    "subnormals": lambda rng: rng.integers(0, 1 << 23, (64, K)).astype(np.uint32).view(F),
    "44 rows": lambda rng: near(rng, 7)[:44],
    "one block": lambda rng: near(rng, 7)[:1, :32],
}


def differing(found: Tensor, expected: np.ndarray) -> int:
    assert tuple(found.shape) == expected.shape
    if found.dtype == torch.float32:  # NaN has many spellings; any is NaN
        a, b = found.numpy(), expected
        return int((~((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b)))).sum())
    raw = found.contiguous().reshape(-1).view(torch.uint8).numpy()
    return int((raw != np.ascontiguousarray(expected).reshape(-1)).sum())


def compare(q: swapq.QTensor, expected: tuple[np.ndarray, ...]) -> int:
    codes, scales, *scale, values = expected
    count = differing(q.codes, codes) + differing(q.scales, scales) + differing(q.dequantize(torch.float32), values)
    if scale:
        assert q.global_scale is not None
        count += differing(q.global_scale, scale[0])
    return count


@pytest.mark.parametrize("name", SETS)
def test_no_byte_differs_from_the_contract(name: str) -> None:
    x = np.ascontiguousarray(SETS[name](np.random.default_rng(7)))
    tensor = torch.from_numpy(x.copy())
    bf16_exact = not (x.view(np.uint32) & 0xFFFF).any()
    for given in (tensor, tensor.to(torch.bfloat16)) if bf16_exact else (tensor,):
        assert compare(swapq.quantize(given, "mxfp8"), contract.mxfp8_rows(x)) == 0
        assert compare(swapq.quantize(given, "mxfp8", axis=-2), contract.mxfp8_columns(x)) == 0
        for scope in ("tensor", "row", "tile"):
            assert compare(swapq.quantize(given, "nvfp4", scope=scope), contract.nvfp4(x, scope)) == 0
    if bf16_exact and np.isfinite(x).all():
        fast = quantize_matrix(tensor.to(torch.bfloat16), "mxfp8")
        codes, scales, _ = contract.mxfp8_rows(x)
        assert differing(fast.codes, codes) + differing(fast.scales, scales) == 0
        fast = quantize_matrix(tensor.to(torch.bfloat16), "nvfp4")
        codes, scales, _, _ = contract.nvfp4(x, "tensor")
        assert differing(fast.codes, codes) + differing(fast.scales, scales) == 0


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_row_that_is_not_finite_shows_it_and_touches_no_other(bad: float) -> None:
    x = near(np.random.default_rng(3), 7)[:40]
    expected_rows, expected_nv = contract.mxfp8_rows(x), contract.nvfp4(x, "row")
    x = x.copy()
    x[17, 100] = bad
    others = [row for row in range(40) if row != 17]
    for q, expected in (
        (swapq.quantize(torch.from_numpy(x), "mxfp8"), expected_rows),
        (swapq.quantize(torch.from_numpy(x), "nvfp4", scope="row"), expected_nv),
    ):
        values = q.dequantize(torch.float32)
        assert not values[17].isfinite().all()
        operand, scale = q.operand()
        assert not (operand[17].float() * (1 if scale is None else scale[17])).isfinite().all()
        assert differing(q.codes[others], expected[0][others]) == differing(q.scales[others], expected[1][others]) == 0
        assert differing(values[others], expected[-1][others]) == 0


@pytest.mark.parametrize(("value", "bits"), [(mxfp8.ONE_OVER_448, 0x3B124925), (nvfp4.ONE_SIXTH, 0x3E2AAAAB)])
def test_constants_have_the_contracts_bits(value: float, bits: int) -> None:
    assert struct.unpack("<I", struct.pack("<f", value)) == (bits,)
    assert struct.unpack("<f", struct.pack("<f", value)) == (value,)
