"""What the wrappers ask of a GPU at the sizes of large models: launches are noted instead of made, on tensors without memory."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swapq.kernels.cuda import columns, elementwise, grouped_decode, quantize, refused, tiles, word_sums
from swapq.kernels.cuda import program as programs

META = torch.device("meta")
MULTIPROCESSORS = 132
SIGNATURE = re.compile(r'extern "C" __global__ void[^{]*?\b(\w+)\(([^)]*)\) \{', re.S)


class Noted:
    """Stands where a compiled kernel would, and holds its launches to what CUDA and the kernel's own signature allow."""

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.constants: list[tuple[str, dict[str, int]]] = []

    def __call__(self, file: str, device: torch.device, **constants: int) -> Any:
        noted = self
        self.constants.append((file, constants))

        class Kernel:
            def allow_shared_memory(self, nbytes: int) -> None:
                assert 0 < nbytes <= 227 << 10, (file, nbytes)

            def launch(
                self,
                grid: tuple[int, ...],
                threads: int,
                *args: Any,
                shared: int = 0,
                overlap: bool = False,
                together: bool = False,
            ) -> None:
                noted.launches.append(file)
                x, y, z = (*grid, 1, 1)[:3]
                assert x < 2**31, (file, grid)
                assert y <= 65535, (file, grid)
                assert z <= 65535, (file, grid)
                assert threads <= 1024, (file, threads)
                assert not overlap or "wait_for_previous();" in source(file), file
                assert not together or x <= 2 * MULTIPROCESSORS, (file, grid)
                assert [kind(a) for a in args if a is not None] == [
                    k for a, k in zip(args, parameters(file), strict=True) if a is not None
                ], file
                assert all(-(2**31) <= a < 2**31 for a in args if isinstance(a, int)), (file, args)

        return Kernel()


def kind(argument: Tensor | int) -> str:
    return "pointer" if isinstance(argument, Tensor) else "int"


def source(file: str) -> str:
    return (Path(programs.__file__).parent / f"{file}.cu").read_text()


def parameters(file: str) -> list[str]:
    found = SIGNATURE.search(source(file))
    assert found is not None, file
    assert found[1] == file
    return ["pointer" if "*" in p else "int" for p in found[2].split(",")]


@pytest.fixture(name="noted", autouse=True)
def launches_are_noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    noted = Noted()
    for module in (columns, elementwise, quantize, tiles, grouped_decode, refused, word_sums):
        monkeypatch.setattr(module, "program", noted)
    monkeypatch.setattr(quantize, "multiprocessors", lambda _: MULTIPROCESSORS)
    kept = (grouped_decode._kernel, word_sums._kernel)
    for kernel in kept:
        kernel.cache_clear()
    yield noted
    for kernel in kept:
        kernel.cache_clear()


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


# Experts, hidden and inner size: Qwen3 30B, Qwen3.5 397B, Kimi K2, DeepSeek V3
SIZES = [(128, 2048, 768), (512, 4096, 1024), (384, 7168, 2048), (256, 7168, 2048)]


@pytest.mark.parametrize(("experts", "hidden", "inner"), SIZES)
def test_weights_of_whole_layers_are_quantized_and_read_in_launches_that_cuda_takes(
    experts: int, hidden: int, inner: int, noted: Noted
) -> None:
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        w = empty(experts, n, k)
        for fmt in ("nvfp4", "mxfp8"):
            parts = quantize.quantize_matrix(w, fmt)
            assert quantize.expand(parts, fmt).shape == (experts, n, quantize.padded(k, fmt))
            assert quantize.dequantize(parts, fmt).shape == w.shape
        by_columns = columns.quantize_columns(w.flatten(0, 1), (n,) * experts)
        assert by_columns.scales.shape == (experts * -(-n // 32), k)
        columns.column_values(w.flatten(0, 1), (n,) * experts)
        columns.stored_values(by_columns, (n,) * experts)
    expected = {"quantize_rows", "quantize_columns", "expand", "dequantize"}
    if (
        2 * inner * hidden * 2 <= 2 * MULTIPROCESSORS * 112 << 10
    ):  # two of the smaller matrices fit into the shared memory of the whole GPU
        expected.add("quantize_stack")
    assert expected == set(noted.launches)


@pytest.mark.parametrize(("experts", "hidden", "inner"), SIZES)
@pytest.mark.parametrize("tokens", [0, 1, 3, 1024, 1 << 17])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_a_block_of_experts_runs_in_launches_that_cuda_takes(
    experts: int, hidden: int, inner: int, tokens: int, fmt: str, noted: Noted
) -> None:
    top_k, known = 8, empty(2 * experts, dtype=torch.int32)
    ids = empty(tokens, top_k, dtype=torch.int64)
    gate_up = quantize.quantize_matrix(empty(experts, 2 * inner, hidden), fmt)
    down = quantize.quantize_matrix(empty(experts, hidden, inner), fmt)
    table = empty(1 << 16)
    routed = tiles.route(
        ids, experts, grouped_decode.tile_tokens(min(ids.numel(), 64 * experts), experts), local_of=known
    )
    if ids.numel() <= 64 * experts:  # more go through the GEMM
        x = quantize.row_operand(empty(tokens, hidden), fmt)
        h = grouped_decode.grouped_decode(x, gate_up, fmt, routed, spread=True, table=table)
        h = quantize.row_operand(h, fmt)
        y = grouped_decode.grouped_decode(h, down, fmt, routed, spread=False)
    else:
        y = empty(tokens * top_k, hidden)
    weights = empty(tokens, top_k, dtype=torch.float32)
    out = elementwise.combine(y, weights, top_k, ids=ids, experts=experts, local_of=known)
    assert out.shape == (tokens, hidden)
    rows = empty(tokens * top_k, 2 * inner)
    half = elementwise.swiglu(rows, table)
    elementwise.swiglu_backward(rows, table, empty(1 << 16, dtype=torch.float32), half)
    slots = empty(tokens * top_k, dtype=torch.int64)
    elementwise.combine_backward(y, weights, slots, top_k, out)
    assert {"routing", "combine", "combine_backward", "swiglu"} <= set(noted.launches)


@pytest.mark.parametrize("lead", [(0,), (2, 0), (1,), (2, 3)])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_a_linear_keeps_the_leading_shape_also_of_no_rows(lead: tuple[int, ...], fmt: str) -> None:
    pytest.importorskip("triton")
    from swapq.kernels import fast

    w = quantize.quantize_matrix(empty(96, 64), fmt)
    assert fast.dense_linear(empty(*lead, 64), w, fmt, empty(96)).shape == (*lead, 96)


@pytest.mark.parametrize("experts", [1, 8, 256])
@pytest.mark.parametrize("n", [32, 2048, 53248])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_a_decode_kernel_gets_whole_rounds_of_a_row_of_any_length_and_its_blocks_fit(
    fmt: str, n: int, experts: int, noted: Noted
) -> None:
    form = quantize.formats.get(fmt)
    tokens = {tokens for rows in (1, 9, 17, 33, 256) if (tokens := grouped_decode.dense_tile_tokens(rows, n))} | {8, 32}
    for k in (*range(32, 2048, 32), 4096, 7168, 7200, 16384, 17440, 53248, 1 << 18):
        shapes = {
            (t, gated, grouped_decode._shape(fmt, n, t, gated, experts)) for t in (8, 32) for gated in (False, True)
        }
        shapes |= {(t, False, grouped_decode._shape_alone(n, most)) for t in tokens for most in (1, 4, 32)}
        for t, gated, shape in shapes:
            _, shared = grouped_decode._kernel(META, fmt, n, k, t, gated, False, shape)
            c = noted.constants[-1][1]
            assert c["CHUNK"] >= quantize.padded(k, fmt) or c["CHUNK"] % (c["GROUP"] * c["AHEAD"]) == 0, (k, shape)
            assert 8 * c["TILES"] == t <= 32 * c["WARPS"]
            rows = 16 * c["M_TILES"] * c["WARPS"]
            assert shared == 2 * t * (c["CHUNK"] + 16) + rows * (c["CHUNK"] // form.block + 16)
            known = 8 * t + 4 + 8 + 1024  # slots, scales, the barrier and what CUDA takes
            assert c["BLOCKS"] * (shared + known) <= 228 << 10, (k, shape)


@pytest.mark.parametrize("offset", range(9))
def test_kernels_get_rows_that_start_at_sixteen_bytes(offset: int) -> None:
    flat = torch.randn(offset + 4 * 32).bfloat16()
    view = flat[offset:].view(4, 32)
    found = quantize.aligned(view)
    assert found.data_ptr() % 16 == 0
    assert torch.equal(found, view)
    assert torch.equal(quantize.aligned(view.t()), view.t())
    assert quantize.aligned(view.t()).is_contiguous()


def test_tensors_of_any_size_are_digested_in_launches_that_cuda_takes(noted: Noted) -> None:
    words = [empty(count, dtype=torch.int32) for count in (0, 1, 1 << 16, (1 << 16) + 1, 1 << 30, (1 << 31) - 1)]
    for each in words:
        word_sums.add_word_sums(each, empty(2, dtype=torch.int64))
    word_sums.add_many_word_sums(words, empty(len(words), 2, dtype=torch.int64))
    assert noted.launches == ["word_sums"] * len(words) + ["word_sums_many"]


def test_one_launch_looks_at_every_weight_of_a_model() -> None:
    looked = [
        empty(128, 1536, 2048),
        empty(0, 5),
        empty(151936, 2048, dtype=torch.float32),
        empty(7, dtype=torch.bfloat16),
    ]
    with pytest.MonkeyPatch.context() as patch:
        kinds, table = [0, 0, 1, 0], []
        patch.setattr(torch, "tensor", lambda rows, **_: table.extend(rows) or empty(len(rows), 4, dtype=torch.int64))
        assert refused.any_refused(looked, kinds).shape == (4,)
    assert [row[1] for row in table] == [x.numel() * x.element_size() for x in looked]
    assert [row[3] for row in table] == [0, 12288, 12288, 12288 + 18992]
