"""A KV connector outlives the prefix cache: after an update it must not bring back what the old weights computed."""

from collections.abc import Iterator

import pytest

from tests.vllm import faults, inside, updates
from tests.vllm.conftest import Exports
from tests.vllm.engine import Engine

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    transfer = {
        "kv_connector": "ForgettingConnector",
        "kv_connector_module_path": "tests.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path_factory.mktemp("kv"))},
    }
    engine = Engine(exports("nvfp4-rl"), enforce_eager=True, block_size=32, kv_transfer_config=transfer)
    yield engine
    engine.close()


def test_after_an_update_a_connector_brings_nothing_back(engine: Engine, exports: Exports) -> None:
    first, second = str(exports("nvfp4-rl")), str(exports("nvfp4-rl", 1))
    over_first, cached = engine(inside.generated_from_a_long_prompt)
    assert cached == 0
    assert engine(inside.generated_from_a_long_prompt) == (over_first, 32), "nothing was cached that could come back"
    engine(updates.update, second)
    over_second, cached = engine(inside.generated_from_a_long_prompt)
    assert cached == 0
    assert over_second != over_first
    engine(updates.update, first)
    assert engine(inside.generated_from_a_long_prompt) == (over_first, 0)


def test_a_connector_that_cannot_forget_is_refused_and_nothing_is_changed(engine: Engine, exports: Exports) -> None:
    said, holds_the_same = engine(faults.update_with_a_connector_that_keeps, str(exports("nvfp4-rl", 1)))
    assert "ForgettingConnector, has no reset_cache()" in said
    assert holds_the_same
    assert engine(inside.score).isfinite().all()
