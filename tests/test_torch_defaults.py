"""Torch's default device and dtype, which a user or an engine may have set, change no byte and no gradient."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

import swapq
from swapq.digest import tensor_digest
from swapq.formats import hadamard
from swapq.kernels import cpu, word_sums
from swapq.kernels.cuda import tiles
from swapq.kernels.routing import Routing
from swapq.nn import functional, gate
from swapq.nn.low_precision import gradients_of
from swapq.qtensor import quantize
from tests.helpers.models import qwen3_moe

#: a device on which nothing can be read
ELSEWHERE = torch.device("meta")


def forget() -> None:
    """Drop every constant that was made before."""
    for cached in (gate._table, gate._slopes, hadamard.matrix, word_sums.lane_keys, word_sums._chunk_table):
        cached.cache_clear()
    word_sums._host_keys.cache_clear()


@contextmanager
def defaults(dtype: torch.dtype) -> Iterator[None]:
    forget()
    before = torch.get_default_dtype()
    torch.set_default_device(ELSEWHERE)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)
        forget()


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float32, device="cpu").bfloat16()


def weights() -> list[Tensor]:
    large = noise(1024, 1056)
    assert large.numel() > cpu._MANY
    return [
        t
        for x in (noise(3, 64, 64), large)
        for fmt in ("nvfp4", "mxfp8")
        for t in quantize(x, fmt).parts
        if t is not None
    ]


def activations() -> list[Tensor]:
    return [gate.activation_table(act, torch.device("cpu")) for act in ("silu", "gelu_pytorch_tanh")]


def gradients() -> list[Tensor]:
    routing = Routing.of(torch.tensor([[0, 2], [2, 5], [2, 0]], device="cpu"), 3)
    spec = functional.LinearSpec("nvfp4_tile", "nvfp4_tile", "low_precision")
    found = []
    for fmt in ("mxfp8", "fp8_block", "nvfp4_tile"):
        torch.manual_seed(0)
        master, rows = noise(3, 32, 64), noise(5, 64)
        w = functional.quantize_weight(master, fmt)
        saved = gradients_of(fmt).save(rows, master, w, routing)
        dy = noise(5, 32)
        found += [
            gradients_of(fmt).input_grad(saved, dy, routing, spec, w.scope),
            gradients_of(fmt).weight_grad(saved, dy, routing, torch.float32),
        ]
    return [*found, routing.ends, routing.positions, tiles.tiles_of(routing, 2).table]


def digests() -> list[str]:
    return [tensor_digest(noise(*shape)) for shape in ((3, 5), (700, 999))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("made", [weights, activations, gradients, digests])
def test_nothing_that_is_made_depends_on_them(made: Callable[[], list[Tensor] | list[str]], dtype: torch.dtype) -> None:
    expected = made()
    with defaults(dtype):
        found = made()
    for a, b in zip(found, expected, strict=True):
        if isinstance(a, str):
            assert a == b
        else:
            assert a.dtype == b.dtype
            assert tensor_digest(a) == tensor_digest(b)


@pytest.mark.parametrize("layout", ["swapq", "modelopt", "compressed-tensors"])
def test_a_converted_checkpoint_does_not_depend_on_them(layout: str, tmp_path: Path) -> None:
    qwen3_moe().to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    swapq.convert_checkpoint(tmp_path / "bf16", tmp_path / "plain", "nvfp4-rl", layout=layout)
    with defaults(torch.bfloat16):
        swapq.convert_checkpoint(tmp_path / "bf16", tmp_path / "moved", "nvfp4-rl", layout=layout)
    assert swapq.digest(tmp_path / "moved") == swapq.digest(tmp_path / "plain")
