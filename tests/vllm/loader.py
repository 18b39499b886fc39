"""vLLM's model loader without an engine, so that one process can try many checkpoints that must be refused."""

import os
from typing import Any

_started = False


def load(llm: Any, directory: str, **options: Any) -> str:
    """Load ``directory`` as an engine would, up to the point of serving: "loaded", or the error with its causes.

    The first argument is the engine's place in :class:`tests.vllm.engine.Engine`, here None.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    try:
        config = EngineArgs(
            model=directory, skip_tokenizer_init=True, max_model_len=64, enforce_eager=True, **options
        ).create_engine_config()
        with set_current_vllm_config(config):
            _start_groups(config)
            get_model_loader(config.load_config).load_model(vllm_config=config, model_config=config.model_config)
    except Exception as error:  # noqa: BLE001 - the test reads it
        chain, seen = error, []
        while chain is not None:
            seen.append(f"{type(chain).__name__}: {chain}")
            chain = chain.__cause__ or chain.__context__
        return "\n".join(seen)
    return "loaded"


def _start_groups(config: Any) -> None:
    global _started
    if _started:
        return
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29577")
    init_distributed_environment(1, 0, "env://", 0, "gloo")
    initialize_model_parallel(1, 1)
    _started = True


def load_twice(llm: Any, directory: str) -> bool:
    """Whether two loads in one process give the same parameters (nothing latches at the first)."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    models = []
    for _ in range(2):
        config = EngineArgs(
            model=directory, skip_tokenizer_init=True, max_model_len=64, enforce_eager=True
        ).create_engine_config()
        with set_current_vllm_config(config):
            _start_groups(config)
            models.append(
                get_model_loader(config.load_config).load_model(vllm_config=config, model_config=config.model_config)
            )
    first, second = (dict(m.named_parameters()) for m in models)
    bits = all(
        torch.equal(p.data.reshape(-1).view(torch.uint8), second[n].data.reshape(-1).view(torch.uint8))
        for n, p in first.items()
    )
    return first.keys() == second.keys() and bits
