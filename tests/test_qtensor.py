"""Quantized tensors and digests outside the usual way: odd shapes, a shared amax, pickles, moves, and what a digest tells apart."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor

import swapq

FORMATS = [
    ("mxfp8", None, -1),
    ("mxfp8", None, -2),
    ("nvfp4", "tensor", -1),
    ("nvfp4", "row", -1),
    ("nvfp4", "tile", -1),
]


# quantize and QTensor


@pytest.mark.parametrize(("fmt", "scope", "axis"), FORMATS)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (1, 32), (2, 0, 64), (0, 4, 64), (2, 2, 3, 64), (17, 32)])
def test_any_shape_has_the_parts_that_the_format_promises(
    fmt: str, scope: str | None, axis: int, shape: tuple[int, ...]
) -> None:
    q = swapq.quantize(torch.randn(shape), fmt, scope=scope, axis=axis)
    assert q.shape == q.dequantize().shape == shape
    promised = q.spec.part_shapes(shape, scope=q.scope, axis=axis)
    assert {name: tuple(part.shape) for name, part in q.named_parts().items()} == promised


@pytest.mark.parametrize(("fmt", "scope"), [("mxfp8", None), ("nvfp4", "tensor"), ("nvfp4", "row")])
def test_a_vector_is_the_row_of_a_matrix(fmt: str, scope: str | None) -> None:
    x = torch.randn(64)
    q, row = swapq.quantize(x, fmt, scope=scope), swapq.quantize(x[None], fmt, scope=scope)
    assert q.shape == (64,)
    assert torch.equal(q.dequantize(), row.dequantize()[0])


@pytest.mark.parametrize(
    ("shape", "scope", "amax"),
    [((1, 4, 64), "tensor", (4,)), ((4, 64), "tensor", (4,)), ((4, 64), "row", (1,)), ((4, 64), "tile", (4, 1))],
)
def test_an_amax_that_would_broadcast_into_another_tensor_is_refused(
    shape: tuple[int, ...], scope: str, amax: tuple[int, ...]
) -> None:
    with pytest.raises(swapq.SwapqError, match="amax"):
        swapq.quantize(torch.randn(shape), "nvfp4", scope=scope, amax=torch.ones(amax))


def test_one_amax_serves_every_scope_and_a_vector_of_them_each_its_own() -> None:
    x = torch.randn(3, 4, 64)
    one, each = (swapq.quantize(x, "nvfp4", amax=a) for a in (torch.tensor(9.0), torch.full((3,), 9.0)))
    assert swapq.digest(one) == swapq.digest(each)
    assert one.global_scale is not None
    assert one.global_scale.shape == (3,)


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_a_qtensor_is_pickled_saved_copied_and_moved_as_bytes(fmt: str) -> None:
    q = swapq.quantize(torch.randn(2, 4, 64, dtype=torch.bfloat16), fmt)
    buffer = io.BytesIO()
    torch.save({"q": q}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)["q"]  # weights_only
    for twin in (pickle.loads(pickle.dumps(q)), loaded, copy.deepcopy(q), q.clone(), q.to("cpu", copy=True)):
        assert isinstance(twin, swapq.QTensor)
        assert swapq.digest(twin) == swapq.digest(q)
        assert twin.dtype == q.dtype
        twin.codes.view(torch.uint8).zero_()
    assert q.codes.view(torch.uint8).any()
    for dtype in (torch.float32, torch.float16):
        other = q.to(dtype)
        assert (other.dtype, other.dequantize().dtype) == (dtype, dtype)
        assert swapq.digest(other) == swapq.digest(q)
    with pytest.raises(swapq.SwapqError, match="dequantize"):
        q.to(torch.int32)


# Digests


def test_digests_tell_simple_changes_apart() -> None:
    base = torch.randint(0, 256, (64, 64), dtype=torch.uint8)
    long = torch.randn(200_000)
    versions: list[Tensor] = [
        base,
        base.reshape(32, 128),
        base.t(),
        *(base.view(d) for d in (torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int32)),
        *(torch.zeros(n, dtype=torch.uint8) for n in range(6)),
        *(torch.zeros(shape) for shape in ((0, 5), (5, 0), (1, 0, 5))),
        long,
    ]
    for i in range(63):
        swapped = base.clone()
        swapped[[i, i + 1]] = swapped[[i + 1, i]]
        versions.append(swapped)
    for i in range(0, 4000, 40):
        flat = base.flatten().clone()
        flat[i] ^= 0x80
        versions.append(flat.view(64, 64))
        one = long.clone()
        one[[i, i + 65536]] = one[[i + 65536, i]]  # the same lane of two chunks
        two = long.clone()
        two[[i, i + 1, i + 65536]] *= -1
        versions += [one, two]
    digests = {swapq.digest(v) for v in versions}
    assert len(digests) == len(versions)


@pytest.mark.parametrize("other", [5, None, b"model", [torch.zeros(1)]])
def test_a_digest_of_something_else_is_refused(other: object) -> None:
    with pytest.raises(swapq.SwapqError, match=type(other).__name__):
        swapq.digest(other)  # type: ignore[arg-type]
