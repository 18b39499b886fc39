"""Headers and indexes are untrusted: nothing outside the folder is opened, and every disagreement is an error that names itself."""

import json
import struct
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from swapq.errors import CheckpointError
from swapq.headers import read_folder, read_json, read_shard
from tests.helpers.families import qwen_config, qwen_headers, write_folder, write_shard

INDEX = "model.safetensors.index.json"


def write_raw(path, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(dtype="BF16", shape=(2, 2), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_headers_say_what_safetensors_wrote(tmp_path):
    tensors = {
        "a": torch.zeros(3, 5, dtype=torch.bfloat16),
        "scalar": torch.tensor(1.0),
        "e8m0": torch.zeros(4, dtype=torch.uint8),
        "codes": torch.zeros(2, 32, dtype=torch.float8_e4m3fn),
        "empty": torch.zeros(0, 7),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    folder = read_folder(tmp_path)
    assert {n: (t.shape, t.dtype) for n, t in folder.tensors.items()} == {
        n: (tuple(t.shape), t.dtype) for n, t in tensors.items()
    }
    raw = (tmp_path / "model.safetensors").read_bytes()
    scalar = folder.tensors["scalar"]
    assert struct.unpack("<f", raw[scalar.start : scalar.end]) == (1.0,)
    assert folder.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())


def test_shards_and_their_index_are_read_together(tmp_path):
    whole = read_folder(write_folder(tmp_path / "one", qwen_config(), qwen_headers()))
    split = read_folder(write_folder(tmp_path / "many", qwen_config(), qwen_headers(), shards=5))
    assert len(split.files) == 5
    assert {n: t.shape for n, t in split.tensors.items()} == {n: t.shape for n, t in whole.tensors.items()}


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": entry()}, b"1234567", "cut short"),
        ({"a": entry()}, b"123456789", "no tensor owns"),
        ({"a": entry(), "b": entry(offsets=(9, 17))}, bytes(17), "leaves a hole"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), "overlaps"),
        ({"a": entry(offsets=(4, 12))}, bytes(12), "hole"),
        ({"a": entry(shape=(3, 2))}, bytes(8), "12 bytes, its data_offsets span 8"),
        ({"a": entry(shape=(-1, -4))}, bytes(8), "shape of a"),
        ({"a": entry(shape=(True, 4))}, bytes(8), "shape of a"),
        ({"a": entry(shape=(2.0, 2))}, bytes(8), "shape of a"),
        ({"a": entry(shape=(1 << 62, 1 << 62))}, bytes(8), "span 8"),
        ({"a": entry(offsets=(8, 0))}, bytes(8), "data_offsets of a"),
        ({"a": entry(offsets=(0, 8, 9))}, bytes(8), "data_offsets of a"),
        ({"a": entry(dtype="F4_E9")}, bytes(8), "dtype of a is 'F4_E9'"),
        ({"a": entry(dtype=["BF16"])}, bytes(8), "dtype of a"),
        ({"a": {"dtype": "BF16"}}, b"", "must have dtype, shape and data_offsets"),
        ({"a": 7}, b"", "must have dtype, shape and data_offsets"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
        ([], b"", "expected a JSON object"),
        (b"{", b"", "not readable as JSON"),
        (b"\xff\xfe", b"", "not readable as JSON"),
        (b"[" * 100_000, b"", "not readable as JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", b"", "JSON"),
        (b'{"a": 1, "a": 2}', b"", "key 'a' appears twice"),
        (b'{"__metadata__": {"a": "\\uD800"}}', b"", "surrogates"),
        (b'{"\\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}', b"", "surrogates"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, header, data, says):
    path = write_raw(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=says) as caught:
        read_shard(path)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"1234567", struct.pack("<Q", 1 << 40) + b"{}", struct.pack("<Q", 99) + b"{}"])
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path, raw):
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_folder(tmp_path)


def test_a_shard_that_lost_its_last_kilobyte_is_named(tmp_path):
    folder = write_folder(tmp_path, qwen_config(), qwen_headers(), shards=3)
    last = folder / "model-00003-of-00003.safetensors"
    last.write_bytes(last.read_bytes()[:-1024])
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors: is cut short"):
        read_folder(folder)


ESCAPES = [
    "../x.safetensors",
    "/etc/x.safetensors",
    "a/b.safetensors",
    "..\\x.safetensors",
    "C:\\x.safetensors",
    "C:x.safetensors",
]


@pytest.mark.parametrize(
    "file", [*ESCAPES, "..", ".", "", "x\0.safetensors", "x\n.safetensors", "model.bin", 3, None, ["a"]]
)
def test_an_index_never_leads_out_of_the_folder(tmp_path, file):
    folder = write_folder(tmp_path / "in", qwen_config(), qwen_headers(), shards=2)
    (tmp_path / "x.safetensors").write_bytes(b"")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = file
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is"):
        read_folder(folder)


def test_index_and_headers_must_agree_in_both_directions(tmp_path):
    folder = write_folder(tmp_path, qwen_config(), qwen_headers(), shards=2)
    index = json.loads((folder / INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))

    def says(match, **changes):
        weight_map = {**index["weight_map"], **changes}
        weight_map = {k: v for k, v in weight_map.items() if v}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=match):
            read_folder(folder)

    says("lists ghost.weight, which no shard holds", **{"ghost.weight": first})
    says("holds lm_head.weight, which", **{"lm_head.weight": ""})
    says(f"places lm_head.weight in {first}, it is in {second}", **{"lm_head.weight": first})
    says("names model-9.safetensors, not in the folder", **{"lm_head.weight": "model-9.safetensors"})
    (folder / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        read_folder(folder)


def test_one_tensor_in_two_shards_is_refused(tmp_path):
    for name in ("a", "b"):
        write_shard(tmp_path / f"{name}.safetensors", {"x": ("BF16", (2,)), f"only_{name}": ("BF16", (2,))})
    weight_map = {"x": "a.safetensors", "only_a": "a.safetensors", "only_b": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"tensor x is in a\.safetensors and in b\.safetensors"):
        read_folder(tmp_path)


def test_a_folder_in_which_nothing_says_what_counts_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        read_folder(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="holds no safetensors"):
        read_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pickles are not read"):
        read_folder(tmp_path)
    for i in (1, 2):
        write_shard(tmp_path / f"model-0000{i}-of-00003.safetensors", {f"x{i}": ("BF16", (2,))})
    with pytest.raises(CheckpointError, match="nothing says that they are all"):
        read_folder(tmp_path)
    both = write_folder(tmp_path / "both", qwen_config(), qwen_headers(), shards=2)
    write_shard(both / "model.safetensors", {"x": ("BF16", (2,))})
    with pytest.raises(CheckpointError, match="readers disagree"):
        read_folder(both)


def test_a_json_file_must_be_an_object(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        read_json(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_mutated_shard_is_read_or_refused_and_nothing_else(tmp_path, data):
    """One to three bytes changed anywhere in the header: either an error of ours, or a header that fits the file."""
    path = tmp_path / "model.safetensors"
    write_shard(path, {"a.weight": ("BF16", (2, 4)), "b": ("F32", ()), "c": ("U8", (3,))})
    raw = bytearray(path.read_bytes())
    header_end = len(raw) - 23
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        shard = read_shard(path)
    except CheckpointError:
        return
    spans = sorted((t.start, t.end) for t in shard.values())
    assert spans[-1][1] == len(raw)
    assert all(before[1] == after[0] for before, after in pairwise(spans))
