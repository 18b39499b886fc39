"""What FP8 block and INT4 ask of a GPU at the sizes of large models: launches are noted instead of made, on tensors without memory."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from swapq import formats
from swapq.errors import SwapqError
from swapq.formats import Parts
from swapq.kernels import dispatch, fast, stored, stored_gemm
from swapq.kernels.routing import Routing
from tests.test_cuda_launches import META, SIZES, Noted, empty, launches_are_noted  # noqa: F401  a fixture

FORMATS = ("fp8_block", "int4", "int4_g32")


class Grid:
    """Stands where the Triton kernel would, and holds its launches to what the kernel assumes of its arguments."""

    def __init__(self) -> None:
        self.products: list[tuple[int, int, int]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            x, x_scale, codes, scales, scale_row, bias, slots, tiles, y, rows, _, n, k, blocks, scale_rows = args
            experts = codes.shape[0]
            assert 0 <= grid[0] < 2**31
            assert all(t.is_contiguous() for t in args if isinstance(t, Tensor))
            assert codes.dtype == torch.uint8
            assert (codes.shape[1], x.shape[1]) == (n, k)
            assert codes.shape[2] * (2 if constants["INT4"] else 1) == k
            assert scales.shape == (experts, scale_rows, blocks)
            assert k % 16 == 0  # Triton is told that rows start at sixteen bytes
            if constants["INT4"]:
                assert (x.dtype, scales.dtype, x_scale) == (torch.bfloat16, torch.bfloat16, None)
                assert (scale_rows, blocks) == (n, k // constants["GROUP"])
            else:
                assert (x.dtype, scales.dtype) == (torch.float16, torch.float32)
                assert x_scale.shape == (x.shape[0], blocks)
                assert blocks == -(-k // constants["BK"])
                assert (scale_row.shape, scale_row.dtype) == ((n,), torch.int32)
            assert bias is None or (bias.shape, bias.dtype) == ((experts, n), torch.float32)
            assert (y.shape, y.dtype) == ((rows, n), torch.bfloat16)
            if constants["DENSE"]:
                assert slots is tiles is None
                assert experts == 1
                assert (grid[0] // -(-n // constants["BN"])) * constants["BM"] >= rows
            else:
                assert tiles.numel() == 1 + 3 * (grid[0] // -(-n // constants["BN"]))
            self.products.append((rows, n, k))

        return launch


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> Grid:
    grid = Grid()
    monkeypatch.setattr(stored_gemm, "_kernel", grid)
    monkeypatch.setattr(stored, "_kept_rows", {})
    return grid


def weight(fmt: str, *shape: int, scope: str | None = None) -> Parts:
    """As an engine holds it."""
    form = formats.get(fmt)
    shapes = form.part_shapes(shape, scope=scope or form.default_scope)
    return Parts(**{name: empty(*s, dtype=form.dtypes[name]) for name, s in shapes.items()})


@pytest.mark.parametrize(("experts", "hidden", "inner"), [*SIZES, (8, 208, 144), (8, 16384, 53248)])
@pytest.mark.parametrize("tokens", [0, 1, 3, 1 << 17])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_block_of_experts_runs_in_launches_that_cuda_takes(
    experts: int, hidden: int, inner: int, tokens: int, fmt: str, noted: Noted, grid: Grid
) -> None:
    if fmt != "fp8_block" and (hidden % 128 or inner % 128):
        pytest.skip("INT4 has whole groups")
    scope = formats.get(fmt).scope_of_stack(2 * inner, 2)
    y = fast.stored_block(
        empty(tokens, hidden), empty(tokens, 8, dtype=torch.int64), empty(tokens, 8, dtype=torch.float32),
        weight(fmt, experts, 2 * inner, hidden, scope=scope), weight(fmt, experts, hidden, inner), fmt, empty(1 << 16),
        scope=scope, local_of=empty(2 * experts, dtype=torch.int32),
    )  # fmt: skip
    assert y.shape == (tokens, hidden)
    assert grid.products == [(8 * tokens, 2 * inner, hidden), (8 * tokens, hidden, inner)]
    between = ["quantize_rows", "quantize_rows"] if fmt == "fp8_block" else ["swiglu"]
    assert noted.launches == ["routing", *between, "combine"]


@pytest.mark.parametrize("lead", [(), (0,), (2, 0), (1,), (2, 3), (1 << 17,)])
@pytest.mark.parametrize(("n", "k"), [(1, 128), (130, 256), (262144, 16384)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_linear_keeps_the_leading_shape(lead: tuple[int, ...], n: int, k: int, fmt: str, grid: Grid) -> None:
    assert fast.dense_linear(empty(*lead, k), weight(fmt, n, k), fmt, empty(n)).shape == (*lead, n)


@pytest.mark.parametrize("fmt", [*FORMATS, "nvfp4", "mxfp8"])
def test_rows_of_another_length_are_refused_before_a_kernel_reads_past_them(fmt: str) -> None:
    w, stack = weight(fmt, 96, 256), weight(fmt, 2, 96, 256)
    with pytest.raises(SwapqError, match=r"rows of 128, the .* rows of 256"):
        fast.dense_linear(empty(3, 128), w, fmt, None)
    with pytest.raises(SwapqError, match=r"rows of 512, the .* rows of 256"):
        fast.routed_rows(empty(3, 512), stack, fmt, "tile", None, Routing.single(3, torch.device("cpu")), gather=False)


def test_what_is_made_while_a_graph_is_captured_is_not_kept_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[Any, Tensor] = {}
    monkeypatch.setattr(stored, "_kept_rows", kept)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch, "arange", lambda n, **_: torch.zeros(n, dtype=torch.int32).cumsum(0))
    stored._scale_rows(300, 3, "tile", torch.device("cuda", 0))
    assert not kept
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Mock())
    made = stored._scale_rows(300, 3, "tile", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert stored._scale_rows(300, 3, "tile", torch.device("cuda", 0)) is made


def test_what_is_kept_for_every_stream_is_there_before_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[Any, Tensor] = {}
    stream = Mock()
    stream.synchronize.side_effect = lambda: waited.append(dict(kept))
    waited: list[dict[Any, Tensor]] = []
    monkeypatch.setattr(stored, "_kept_rows", kept)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch, "arange", lambda n, **_: torch.zeros(n, dtype=torch.int32).cumsum(0))
    for _ in range(2):
        stored._scale_rows(300, 3, "tile", torch.device("cuda", 0))
    assert waited == [{}]  # once, and before another thread could find it
    assert len(kept) == 1


@pytest.mark.parametrize("beside", ["nvfp4", "mxfp8"])
def test_nothing_comes_between_the_routing_and_the_kernel_that_runs_beside_it(
    beside: str, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate_up, down = weight(beside, 4, 64, 64), weight(beside, 4, 64, 32)
    if beside == "nvfp4":
        gate_up, down = (p._replace(global_scale=empty(4, dtype=torch.float32)) for p in (gate_up, down))
    clone, seen = Tensor.clone, noted.launches
    copied: set[int] = set()

    def at(x: Tensor) -> int:  # only what was copied starts at sixteen bytes
        return 0 if id(x) in copied else 8

    def copy(x: Tensor) -> Tensor:
        seen.append("copy")
        out = clone(x)
        keep.append(out), copied.add(id(out))
        return out

    keep: list[Tensor] = []
    monkeypatch.setattr(Tensor, "data_ptr", at)
    monkeypatch.setattr(Tensor, "clone", copy)
    fast.stored_block(
        empty(3, 64), empty(3, 2, dtype=torch.int64), empty(3, 2, dtype=torch.float32), gate_up, down, beside, empty(1 << 16)
    )  # fmt: skip
    assert seen[:3] == ["copy", "routing", "quantize_rows"]


@pytest.mark.parametrize(
    ("weights", "rows", "shape", "slices", "expected"),
    [
        ("fp8_block", "fp8_block", (8, 2816, 208), 1, True),
        ("int4_g32", "bf16", (8, 130, 96), 1, True),
        # a row scale does not reach over the slices of `expert_tp`
        ("fp8_block", "fp8_block", (8, 256, 256), 2, False),
        ("int4", "bf16", (8, 256, 256), 2, False),
        ("fp8_block", "fp8_block", (8, 256, 200), 1, False),
        ("fp8_block", "bf16", (8, 256, 256), 1, False),
        ("int4", "fp8_block", (8, 256, 256), 1, False),
        ("nvfp4_tile", "nvfp4_tile", (8, 256, 256), 1, False),
        ("nvfp4", "bf16", (8, 256, 256), 1, False),
    ],
)
def test_kernels_take_what_they_compute_and_leave_the_rest_to_the_reference(
    weights: str, rows: str, shape: tuple[int, ...], slices: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "kernels", lambda _: True)
    assert dispatch.fast(META, weights, rows, shape, slices) is expected
