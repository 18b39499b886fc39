"""Whole conversions of damaged and hostile sources: each ends in an error of ours or in a right result, and never in a wrong checkpoint."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import swapq
from tests.helpers.models import qwen3_moe

INDEX = "model.safetensors.index.json"
Header = dict[str, Any]


def convert(src: Path, dst: Path, recipe: str = "nvfp4-rl", **options: Any) -> Any:
    return swapq.convert_checkpoint(src, dst, recipe, progress=False, **options)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards and an index."""
    folder = tmp_path_factory.mktemp("hostile") / "src"
    model = qwen3_moe().to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="250KB")
    assert len(list(folder.glob("*.safetensors"))) >= 2
    return folder


def read_header(path: Path) -> tuple[Header, bytes]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_header(path: Path, header: "Header | bytes", data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    index = json.loads((folder / INDEX).read_text()) if (folder / INDEX).exists() else None
    names = sorted(set(index["weight_map"].values())) if index else ["model.safetensors"]
    return {k: v for name in names for k, v in load_file(folder / name).items()}


def bits(t: Tensor) -> bytes:
    return bytes(t.contiguous().reshape(-1).view(torch.uint8).numpy()) if t.numel() else b""


def check_outcome(src: Path, dst: Path, run: Callable[[], object]) -> bool:
    """Run a conversion; True if it refused. A result is compared with what the safetensors library and the reference make of the source."""
    try:
        run()
    except swapq.SwapqError:
        assert not (dst / "config.json").exists()
        assert not (dst / "swapq.json").exists()
        return True
    before, after = tensors_of(src), tensors_of(dst)  # raises where the library refuses the source
    listed = json.loads((dst / "config.json").read_text())["quantization_config"]["quantized"]
    quantized = {name for names in listed.values() for name in names}
    for name in before.keys() - quantized:
        assert bits(before[name]) == bits(after[name])
        assert (before[name].dtype, before[name].shape) == (after[name].dtype, after[name].shape)
    for name in quantized:
        pair = [name.replace(a, b) for a in ("gate_proj", "up_proj") for b in ("gate_proj", "up_proj") if a in name]
        weights = [before[n].to(torch.bfloat16) for n in pair or [name]]
        amax = torch.stack([w.abs().amax() for w in weights]).amax().float()
        expected = swapq.quantize(before[name].to(torch.bfloat16), "nvfp4", amax=amax)
        assert bits(expected.codes) == bits(after[name])
        assert bits(expected.scales) == bits(after[f"{name}_scale"])
    assert swapq.verify(dst, source=src).ok
    return False


def flip(src: Path, draw: Any) -> None:
    """Bytes anywhere in a shard's length field or header."""
    path = draw(st.sampled_from(sorted(src.glob("*.safetensors"))))
    raw = bytearray(path.read_bytes())
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    for _ in range(draw(st.integers(1, 3))):
        raw[draw(st.integers(0, end - 1))] = draw(st.integers(0, 255))
    path.write_bytes(raw)


def entry(src: Path, draw: Any) -> None:
    """One tensor's dtype, shape, place or name."""
    path = draw(st.sampled_from(sorted(src.glob("*.safetensors"))))
    header, data = read_header(path)
    name = draw(st.sampled_from(sorted(set(header) - {"__metadata__"})))
    tensor = header[name]
    what = draw(
        st.sampled_from(["dtype", "shape", "both", "offsets", "swap", "rename", "drop", "twice", "extra", "junk"])
    )
    if what in ("dtype", "both"):
        tensor["dtype"] = draw(
            st.sampled_from(["F32", "F16", "I8", "U8", "F8_E4M3", "F8_E8M0", "BOOL", "I64", "F4", 7, None])
        )
    if what in ("shape", "both"):
        shape = tensor["shape"]
        tensor["shape"] = draw(
            st.sampled_from(
                [
                    shape[::-1],
                    [*shape, 1],
                    [],
                    [0],
                    [-1],
                    [2**62, 4],
                    [shape[0] * 2, *shape[1:]],
                    "x",
                    [1.5],
                    None,
                    [True],
                ]
            )
        )
    if what == "offsets":
        a, b = tensor["data_offsets"]
        tensor["data_offsets"] = draw(
            st.sampled_from(
                [
                    [b, a],
                    [a, b + 2],
                    [a - 2, b],
                    [a + 2, b + 2],
                    [0, b - a],
                    [a],
                    [a, b, b],
                    [2**63, 2**64],
                    ["0", b],
                    [a, len(data) + 8],
                ]
            )
        )
    if what == "swap":
        other = header[draw(st.sampled_from(sorted(set(header) - {"__metadata__"})))]
        tensor["data_offsets"], other["data_offsets"] = other["data_offsets"], tensor["data_offsets"]
    if what == "rename":
        del header[name]
        new = draw(
            st.sampled_from(
                [
                    "",
                    ".",
                    "model",
                    "../x",
                    "a/b",
                    "\ud800",
                    "x\0y",
                    "lm_head.weight",
                    f"{name}_scale",
                    f"{name}.weight",
                    name.upper(),
                    "é" * 300,
                ]
            )
        )
        header[new] = tensor
    if what == "drop":
        del header[name]
    if what == "extra":
        header[f"{name}_scale_inv"] = {"dtype": "F32", "shape": [1, 1], "data_offsets": [len(data), len(data) + 4]}
        data += struct.pack("<f", 1.0)
    if what == "junk":
        header[name] = draw(st.sampled_from([None, [], 3, {}, tensor | {"more": 1}]))
    if what == "twice":
        text = json.dumps(header)
        write_header(path, (text[:-1] + f", {json.dumps(name)}: {json.dumps(tensor)}}}").encode(), data)
        return
    write_header(path, header, data)
    if draw(st.booleans()) and (src / INDEX).exists():  # an index that lies in step with the header
        index = json.loads((src / INDEX).read_text())
        index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v != path.name} | {
            k: path.name for k in header if k != "__metadata__"
        }
        (src / INDEX).write_text(json.dumps(index))


def length(src: Path, draw: Any) -> None:
    """A shard that is cut, extended, empty, or claims another header."""
    path = draw(st.sampled_from(sorted(src.glob("*.safetensors"))))
    raw = path.read_bytes()
    path.write_bytes(
        draw(
            st.sampled_from(
                [
                    b"",
                    raw[:7],
                    raw[:8],
                    raw[:100],
                    raw[:-1],
                    raw[:-1024],
                    raw + b"\0",
                    struct.pack("<Q", 2**63) + raw[8:],
                    struct.pack("<Q", 2**64 - 1) + raw[8:],
                    struct.pack("<Q", 0) + raw[8:],
                    struct.pack("<Q", len(raw)) + raw[8:],
                ]
            )
        )
    )


def index(src: Path, draw: Any) -> None:
    """An index that lies."""
    found = json.loads((src / INDEX).read_text())
    weight_map = found["weight_map"]
    name = draw(st.sampled_from(sorted(weight_map)))
    lie = draw(
        st.sampled_from(
            [
                "..\\x.safetensors",
                "C:\\x.safetensors",
                "/abs.safetensors",
                "a/../../b.safetensors",
                "x\0.safetensors",
                "\\\\host\\x.safetensors",
                "file:///x.safetensors",
                "nul",
                "model-00009.safetensors",
                "",
                None,
                5,
                [],
                {},
                "other",
                "drop",
                "ghost",
                "no map",
                "list",
            ]
        )
    )
    if lie == "other":
        weight_map[name] = draw(st.sampled_from(sorted(set(weight_map.values()))))
    elif lie == "drop":
        del weight_map[name]
    elif lie == "ghost":
        weight_map["ghost.weight"] = weight_map[name]
    elif lie == "no map":
        found["weight_map"] = draw(st.sampled_from([None, [], {}, "x"]))
    elif lie == "list":
        found = [found]
    else:
        weight_map[name] = lie
    (src / INDEX).write_text(json.dumps(found))


MUTATIONS = [flip, entry, length, index]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_mutated_source_is_refused_or_converted_right(
    pristine: Path, tmp_path_factory: pytest.TempPathFactory, mutate: Callable[[Path, Any], None], data: Any
) -> None:
    work = tmp_path_factory.mktemp("mutated")
    src, dst = work / "src", work / "dst"
    shutil.copytree(pristine, src)
    try:
        mutate(src, data.draw)
        check_outcome(src, dst, lambda: convert(src, dst, workers=2))
    finally:
        shutil.rmtree(work)
