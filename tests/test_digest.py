"""The two sums behind a digest: one value whatever computes it, and a batch that waits for the device once."""

import sys

import pytest
import torch
from torch import Tensor

from swapq.digest import Digests, tensor_digest
from swapq.kernels import word_sums
from swapq.kernels.word_sums import LANE
from tests.helpers.reads import Reads

COUNTS = [1, 3, 1000, LANE - 1, LANE, LANE + 1, 3 * LANE + 17, 40 * LANE + 5]


def words(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, generator=generator)


def by_definition(w: Tensor) -> list[int]:
    """The docstring's sum, one word after the other in Python's integers."""
    lanes, chunks = (t.tolist() for t in (word_sums.lane_keys(w.device), word_sums.chunk_keys(1, w.device)))
    total = [sum(v * lanes[j][i % LANE] * chunks[j][i // LANE] for i, v in enumerate(w.tolist())) for j in range(2)]
    return [(t + 2**63) % 2**64 - 2**63 for t in total]


@pytest.mark.parametrize("count", [1, 1000, LANE + 3])
def test_the_sums_are_those_of_the_definition(count: int) -> None:
    sums = torch.zeros(2, dtype=torch.int64)
    word_sums.add_word_sums(words(count), sums)
    assert sums.tolist() == by_definition(words(count))


@pytest.mark.parametrize("count", COUNTS)
def test_numpy_torch_and_compiled_loops_agree(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w, found = words(count), []
    for few in (0, 1 << 40):
        monkeypatch.setattr(word_sums, "_FEW", few)
        found.append(torch.ones(2, dtype=torch.int64))
        word_sums.add_word_sums(w, found[-1])
    found.append(torch.ones(2, dtype=torch.int64))
    word_sums._add_in_torch(w, found[-1])
    assert found[0].tolist() == found[1].tolist() == found[2].tolist()


def test_a_batch_gives_each_tensors_own_digest_as_it_was_when_added() -> None:
    tensors = {f"t{i}": torch.randn(i % 7, 3).to(torch.bfloat16) for i in range(1500)}
    expected = {name: tensor_digest(t) for name, t in tensors.items()}
    batch = Digests()
    for name, t in tensors.items():
        batch.add(name, t)
        t.zero_()
    assert batch.result() == expected
    assert list(batch.result()) == list(tensors)


@pytest.mark.parametrize("before", [0, 1, 1000, 1023])
def test_tensors_added_together_have_the_digests_that_each_has_alone(before: int) -> None:
    """Batches and pages begin and end anywhere among them."""
    tensors = {f"t{i}": torch.randn(i % 5, 3).to((torch.bfloat16, torch.float32)[i % 2]) for i in range(70)}
    batch = Digests()
    for i in range(before):
        batch.add(f"before {i}", torch.full((2,), i))
    batch.add_all([])
    batch.add_all(tensors.items())
    batch.add("after", torch.ones(3))
    found = batch.result()
    assert {name: found[name] for name in tensors} == {name: tensor_digest(t) for name, t in tensors.items()}
    assert all(found[f"before {i}"] == tensor_digest(torch.full((2,), i)) for i in range(before))
    assert found["after"] == tensor_digest(torch.ones(3))


@pytest.mark.parametrize(("strided", "most"), [(True, 5), (False, 32)])
def test_copies_of_strided_tensors_do_not_wait_for_a_full_launch(
    monkeypatch: pytest.MonkeyPatch, strided: bool, most: int
) -> None:
    module, launches = sys.modules[Digests.__module__], []
    many = module.add_many_word_sums

    def noted(words: list[torch.Tensor], into: torch.Tensor) -> None:
        launches.append(len(words))
        many(words, into)

    monkeypatch.setattr(module, "add_many_word_sums", noted)
    monkeypatch.setattr(module, "_COPIED", 4 * 64 * 64 * 4)
    tensors = {f"t{i}": torch.randn(64, 64).t() if strided else torch.randn(64, 64) for i in range(70)}
    batch = Digests()
    batch.add_all(tensors.items())
    assert max(launches) == most
    assert batch == {name: tensor_digest(t) for name, t in tensors.items()}


def test_a_batch_is_a_mapping_whose_values_alone_are_waited_for() -> None:
    tensors = {f"t{i}": torch.randn(3, 5) for i in range(40)}
    batch = Digests()
    with Reads() as reads:
        for name, t in tensors.items():
            batch.add(name, t)
        assert set(batch) == set(tensors)
        assert len(batch) == len(tensors)
        assert "t41" not in batch
        assert reads.count == 0
        assert all(batch[name] == value for name, value in batch.result().items())
        assert batch == {name: tensor_digest(t) for name, t in tensors.items()}
    assert batch["t7"] == tensor_digest(tensors["t7"])
    batch.add("t7", tensors["t8"])
    assert batch["t7"] == batch["t8"]


def test_a_batch_is_read_once() -> None:
    batch = Digests()
    for i in range(40):
        batch.add(f"t{i}", torch.randn(3, 5))
    with Reads() as reads:
        for name in batch:
            assert len(batch[name]) == 32
    assert reads.count == 1


def test_chunk_keys_of_a_larger_table_begin_with_those_of_a_smaller() -> None:
    device = torch.device("cpu")
    small, large = word_sums.chunk_keys(3, device), word_sums.chunk_keys(5000, device)
    assert large.shape[1] >= 5000
    assert torch.equal(small, large[:, : small.shape[1]])
