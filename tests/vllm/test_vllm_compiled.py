"""The compiled engine sees updates: its graphs read live weights, not those of the first load."""

from collections.abc import Iterator

import pytest
import torch

import swapq
from tests.vllm import inside, updates
from tests.vllm.conftest import Exports
from tests.vllm.engine import Engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module", params=["nvfp4-rl", "mxfp8-rl", "bf16"])
def compiled(request: pytest.FixtureRequest, exports: Exports) -> Iterator[tuple[Engine, str]]:
    engine = Engine(exports(request.param), enforce_eager=False)
    yield engine, request.param
    engine.close()


def test_updates_reach_the_compiled_graph(compiled: tuple[Engine, str], exports: Exports) -> None:
    engine, recipe = compiled
    first, second = str(exports(recipe)), str(exports(recipe, 1))
    start, places = engine(inside.score), engine(inside.addresses)
    other = engine(updates.update_and_score, second)
    assert not torch.equal(other, start)
    assert engine(inside.served_digests) == swapq.digest(second)
    assert torch.equal(engine(updates.update_and_score, first), start)
    assert engine(inside.addresses) == places
    engine.close()
    fresh = Engine(second, enforce_eager=False)
    try:
        assert torch.equal(fresh(inside.score), other), "an updated engine is not what a fresh one is"
    finally:
        fresh.close()
