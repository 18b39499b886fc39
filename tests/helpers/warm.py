"""Processes that begin with the heavy imports done: a fork server imports them once, and each test's own process is a fork of it.

An engine needs a process of its own, and importing vLLM, TRL and transformers takes longer than most of what is then tested.
"""

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path

import torch

__all__ = ["ENVIRONMENT", "ROOT", "context"]

ROOT = Path(__file__).resolve().parents[2]
#: of every process that runs an engine
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def context() -> BaseContext:
    """Where to start a process. With a GPU each is a new one: CUDA does not survive a fork of a process that has touched it."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["tests.helpers.heavy"])  # only heeded before the server starts
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    with _environment({**ENVIRONMENT, "PYTHONPATH": path, "OMP_NUM_THREADS": threads}):
        forkserver.ensure_running()
    return found
