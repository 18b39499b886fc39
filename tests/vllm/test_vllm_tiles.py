"""FP8 block in merged linears: parts that end in a partial tile, and addresses that CUDA graphs can hold. No engine needed."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swapq.errors import UnsupportedError
from swapq.nn.linear import frozen_linear
from swapq.qtensor import QTensor, quantize

pytest.importorskip("vllm")
linear_method = pytest.importorskip("swapq_vllm.linear_method")
pytestmark = pytest.mark.vllm

K = 160


def merged(sizes: tuple[int, ...]) -> tuple[Any, nn.Module, list[QTensor]]:
    """A method whose layer holds ``sizes`` rows of parts above each other, and the parts."""
    generator = torch.Generator().manual_seed(0)
    parts = [quantize(torch.randn(n, K, generator=generator).bfloat16(), "fp8_block") for n in sizes]
    method = linear_method.SwapqLinearMethod(
        prefix="l", fmt="fp8_block", activations="fp8_block", names={i: f"l.{i}.weight" for i in range(len(sizes))}
    )
    layer = nn.Module()
    method.create_weights(layer, K, list(sizes), K, sum(sizes), torch.bfloat16)
    layer.weight.data.copy_(torch.cat([q.codes for q in parts]))
    layer.weight_scale_inv.data.copy_(torch.cat([q.scales for q in parts]))
    return method, layer, parts


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes stay codes, as on a GPU."""
    monkeypatch.setattr(
        linear_method, "current_platform", SimpleNamespace(is_cpu=lambda: False, is_cuda_alike=lambda: False)
    )


@pytest.mark.parametrize("sizes", [(256, 128, 128), (256, 128, 72), (130, 72, 1), (200,)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_merged_linear_is_its_parts_beside_each_other(sizes: tuple[int, ...], compiled: bool, on_gpu: None) -> None:
    method, layer, parts = merged(sizes)
    method.after_copies(layer)
    apply = torch.compile(method.apply, fullgraph=True, backend="aot_eager") if compiled else method.apply
    for rows in (1, 5):
        x = torch.randn(rows, K, generator=torch.Generator().manual_seed(1)).bfloat16()
        expected = torch.cat([frozen_linear(x, q, None, "fp8_block") for q in parts], -1)
        assert torch.equal(apply(layer, x), expected)


def test_scales_are_spread_only_where_a_part_ends_within_a_tile(on_gpu: None) -> None:
    for sizes, spread in (((256, 128, 72), False), ((130, 72), True), ((200,), False)):
        method, layer, _ = merged(sizes)
        method.after_copies(layer)
        assert (method._parts(layer).scales.shape[0] == sum(sizes)) is spread


def test_what_a_graph_may_hold_stays_where_it_is_and_is_filled_anew(on_gpu: None) -> None:
    method, layer, _ = merged((130, 72))
    method.after_copies(layer)
    held = method.counts
    address, content = held.data_ptr(), held.clone()
    held.zero_()  # an engine that slept
    method.after_copies(layer)
    assert method.counts.data_ptr() == address
    assert torch.equal(method.counts, content)
    assert content.tolist() == [128, 2, 72]


@pytest.mark.parametrize(
    ("graphs", "kernels", "refused"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_linear_that_no_graph_can_hold_is_refused_when_the_engine_is_built(
    graphs: bool, kernels: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_method, "current_platform", SimpleNamespace(is_cuda_alike=lambda: True))
    monkeypatch.setattr(linear_method, "captures_graphs", lambda: graphs)
    monkeypatch.setattr(linear_method.dispatch, "kernels", lambda device: kernels)
    with pytest.raises(UnsupportedError, match=r"200 x 160 .*enforce_eager=True") if refused else nullcontext():
        merged((200,))
