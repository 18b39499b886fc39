"""The CUDA and Triton kernels without a GPU: they compile for Hopper and for Blackwell, and their arithmetic tricks are exact."""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from swapq.errors import SwapqError
from swapq.formats.bits import e2m1_encode, pack_nibbles
from swapq.kernels.cuda import program, quantize
from swapq.kernels.word_sums import LANE
from tests.helpers.triton_kernels import compiled, pointers

pytest.importorskip("cuda.bindings.nvrtc")
ARCHITECTURES = ("sm_90", "sm_100")
_DECODE = {"M_TILES": 2, "WARPS": 8, "BLOCKS": 2, "AHEAD": 2, "LINES": 2}
_ROWS = {"LANES": 32, "THREADS": 256}
KERNELS = [
    *(
        (
            "quantize_rows",
            {"K": k, "FORMAT": f, "OPERAND": o, "GATED": g, "BESIDE": b, "GROUP": 64 if f == 2 else 128, **_ROWS},
        )
        for k in (160, 768)
        for f in (0, 1, 2, 3)
        for o in (0, 1)
        for g, b in ((0, 0), (1, 0), (0, 1))
        if not (f == 1 and (o or g))
    ),
    ("quantize_stack", {"K": 768, "N": 100, "ROWS": 36, "TEAM": 3, "SLOTS": 4, "LEAD": 2, "WARPS": 12}),
    *(("quantize_columns", {"K": 768, "MODE": mode, "THREADS": 256}) for mode in (0, 1, 2)),
    *(("expand", {"K": 160, "NVFP4": nv, "GROUP": 128 if nv else 64, "THREADS": 256}) for nv in (0, 1)),
    *(
        ("dequantize", {"K": 160, "NVFP4": nv, "GROUP": 128 if nv else 64, "SCOPE_ROWS": 7, "THREADS": 256})
        for nv in (0, 1)
    ),
    *(
        (
            "grouped_decode",
            {
                "K": 768,
                "N": 512,
                "NVFP4": nv,
                "GROUP": 128 if nv else 64,
                "TILES": t,
                "CHUNK": 768,
                "GATED": g,
                "SPREAD": g,
                **_DECODE,
            },
        )
        for nv in (0, 1)
        for t, g in ((1, 1), (4, 0))
    ),
    ("routing", {"EXPERTS": 128, "TOKENS": 8, "THREADS": 1024}),
    ("combine", {"H": 768, "THREADS": 256}),
    *((file, {"THREADS": 256, "LANE": LANE, "CHUNKS": 8}) for file in ("word_sums", "word_sums_many")),
    ("refused", {"THREADS": 256, "ROUNDS": 16}),
    ("combine_backward", {"H": 768, "THREADS": 256}),
    *(("swiglu", {"I": 768, "BACKWARD": b, "THREADS": 256}) for b in (0, 1)),
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("kernels")
    patch.setenv("SWAPQ_CACHE", str(folder))
    yield folder
    patch.undo()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("file", sorted({file for file, _ in KERNELS}))
def test_every_kernel_compiles(file: str, architecture: str) -> None:
    for constants in [c for f, c in KERNELS if f == file]:
        assert program.compile_source(f"{file}.cu", architecture, tuple(sorted(constants.items())))[:4] == b"\x7fELF"


def test_no_source_is_left_out() -> None:
    assert {file for file, _ in KERNELS} == {path.stem for path in Path(program.__file__).parent.glob("*.cu")}


def test_a_compiled_kernel_is_kept_and_found_again(cache: object, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = (("H", 64), ("THREADS", 128))
    first = program.compile_source("combine.cu", "sm_90", constants)
    monkeypatch.setattr(program, "_keep", lambda *_: pytest.fail("compiled again"))
    assert program.compile_source("combine.cu", "sm_90", constants) == first


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"  # type: ignore[operator]
    file.write_text("not a folder")
    monkeypatch.setenv("SWAPQ_CACHE", str(file))
    assert program.compile_source("combine.cu", "sm_90", (("H", 32), ("THREADS", 128)))


def test_a_damaged_kernel_in_the_cache_is_compiled_again(cache: Path) -> None:
    constants = (("H", 96), ("THREADS", 128))
    before = set((cache / "kernels").glob("*"))
    first = program.compile_source("combine.cu", "sm_90", constants)
    (kept,) = set((cache / "kernels").glob("*")) - before
    for damaged in (b"", kept.read_bytes()[:-1], b"\0" * 5000):
        kept.write_bytes(damaged)
        assert program.compile_source("combine.cu", "sm_90", constants) == first
        assert kept.read_bytes().endswith(first)


def test_a_user_without_a_home_compiles_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("SWAPQ_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(program.Path, "home", homeless)
    assert program.cache_folder() is None
    assert program.compile_source("combine.cu", "sm_90", (("H", 32), ("THREADS", 128)))


@pytest.mark.parametrize("value", [1 << 31, -(1 << 31) - 1])
def test_an_argument_beyond_32_bits_is_refused_not_wrapped(value: int) -> None:
    with pytest.raises(SwapqError, match="does not fit 32 bits"):
        program._argument(value)


def section_bytes(elf: bytes, name: str) -> int:
    (start,), (size, count, names) = struct.unpack_from("<Q", elf, 0x28), struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, start + i * size) for i in range(count)]
    (found,) = [h[5] for h in headers if elf.startswith(name.encode() + b"\0", headers[names][4] + h[0])]
    return found


@pytest.mark.parametrize(
    ("n", "k"),
    [
        (1536, 2048),
        (2048, 768),
        (64, 768),
        (32, 32),
        (2816, 2048),
        (4096, 1536),
        (1, 16),
        (233904, 16),
        (313896, 16),
        (474144, 16),
    ],
)
def test_the_slices_of_a_team_cover_a_matrix_and_fit_on_the_gpu(n: int, k: int) -> None:
    team = quantize._team(n, k, 264)
    assert team is not None
    assert (team.members - 1) * team.rows < n <= team.members * team.rows
    assert team.members * team.teams <= 264
    constants = {
        "K": k,
        "N": n,
        "ROWS": team.rows,
        "TEAM": team.members,
        "SLOTS": team.slots,
        "LEAD": min(quantize._STACK_LEAD, team.slots - 2),
        "WARPS": quantize._STACK_WARPS,
    }
    cubin = program.compile_source("quantize_stack.cu", "sm_90", tuple(sorted(constants.items())))
    # 1 KB of a block that is CUDA's is in the section
    assert 2 * (section_bytes(cubin, ".nv.shared.quantize_stack") + team.slots * team.rows * k * 2) <= 228 << 10


def test_a_matrix_that_does_not_fit_on_the_gpu_has_no_team() -> None:
    assert quantize._team(4096, 7168, 264) is None


def test_a_source_that_does_not_compile_says_where() -> None:
    with pytest.raises(SwapqError, match=r"combine\.cu: NVRTC"):
        program.compile_source("combine.cu", "sm_90", (("H", 64),))


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("gated", "dense"), [(False, False), (True, False), (False, True)])
def test_the_triton_kernel_compiles(capability: int, gated: bool, dense: bool) -> None:
    pytest.importorskip("triton")
    from swapq.kernels.grouped_gemm import _kernel

    signature = {
        "x": "*fp16", "x_scale": "*fp32", "w": "*fp16", "w_scale": "*fp32", "w_scale_stride": "i32", "bias": "*fp32", "table": "*bf16",
        "slots": "*i32", "tiles": "*i32", "y": "*bf16", "y_stride": "i32", "rows": "i32", "top_k": "i32", "N": "i32", "K": "i32",
    }  # fmt: skip
    constants = {
        "SPREAD": not dense, "SORTED": False, "DENSE": dense, "GATED": gated, "HAS_ROW_SCALE": True, "HAS_SCALE": True, "HAS_BIAS": True,
        "BM": 128, "BN": 128, "BK": 32,
    }  # fmt: skip
    built = compiled(_kernel, signature, constants, capability, num_warps=8, num_stages=4)
    assert "cubin" in built.asm


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize("tile", [16, 32, 128])
def test_the_triton_kernel_of_stored_codes_compiles(capability: int, group: int, tile: int) -> None:
    pytest.importorskip("triton")
    from swapq.kernels.stored_gemm import _kernel, _shape

    shape = _shape(group > 0, tile)

    signature = {
        "x": "*bf16" if group else "*fp16", "x_scale": "*fp32", "codes": "*u8", "scales": "*bf16" if group else "*fp32",
        "scale_row": "*i32", "bias": "*fp32", "slots": "*i32", "tiles": "*i32", "y": "*bf16", "rows": "i32", "top_k": "i32",
        "N": "i32", "K": "i32", "BLOCKS": "i32", "SCALE_ROWS": "i32",
    }  # fmt: skip
    constants = {
        "INT4": group > 0, "SPREAD": True, "SORTED": False, "DENSE": False, "HAS_BIAS": True, "GROUP": group,
        "LEFT": shape.left, "BM": tile, "BN": shape.columns, "BK": 128,
    }  # fmt: skip
    aligned = [*pointers(signature), "K"]  # rows begin at sixteen bytes too
    built = compiled(_kernel, signature, constants, capability, aligned, num_warps=shape.warps, num_stages=shape.stages)
    assert "cubin" in built.asm
    assert built.metadata.shared <= 227 << 10
    # rows and codes are on their way while earlier ones are multiplied: two loads, each two turns ahead
    assert built.asm["ttgir"].count("async_copy_global_to_local") >= 4


ZERO = 0x4AFFFFFC  # bits of 2^23 - 2


def lesser_sum(y: np.ndarray) -> np.ndarray:
    """``e2m1_sum`` of contract.cuh: float64 holds each sum exactly, so one rounding to float32 is that of a fused multiply-add."""
    wide = y.astype(np.float64)
    sums = [total.astype(np.float32).view(np.uint32) for total in (wide + 8388606.0, wide * 0.5 + 8388608.0)]
    return np.minimum(np.minimum(*sums), np.uint32(ZERO + 7))


def test_the_lesser_of_two_sums_counts_codes() -> None:
    edges = (
        np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 1.0, 2.0, 4.0, 6.0, 8.0], np.float32)
        .view(np.uint32)
        .astype(np.int64)
    )
    near = (edges[:, None] + np.arange(-4000, 4001)).ravel()
    random = np.random.default_rng(0).integers(0, 0x7F800001, 4_000_000)
    bits = np.concatenate([near, random, np.arange(0, 0x7F800001, 1 << 16)]).astype(np.uint32)
    v = bits.view(np.float32)
    with np.errstate(over="ignore"):
        found = lesser_sum(v) - np.uint32(ZERO)
    expected = e2m1_encode(torch.from_numpy(v.copy())).numpy()
    assert (found == expected).all()
    # words are packed by additions: the constant part of eight sums is taken away at once
    eight = v[: v.size // 8 * 8].reshape(-1, 8)
    with np.errstate(over="ignore"):
        words = (lesser_sum(eight).astype(np.uint64) << np.arange(0, 32, 4, dtype=np.uint64)).sum(1).astype(np.uint32)
        words -= np.uint32(ZERO * 0x11111111 & 0xFFFFFFFF)
    assert (words.view(np.uint8) == pack_nibbles(e2m1_encode(torch.from_numpy(eight.copy()))).numpy().ravel()).all()
