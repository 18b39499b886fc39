"""The receiving end of a weight update: one transaction that ends with an engine proven to hold what was sent, or with an error.

An engine whose update failed holds a mixture. It refuses to serve until an update lands whole.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swapq.digest import Digests
from swapq.errors import SyncError, UnsupportedError
from swapq_vllm.compat import forget_caches, has_begun_requests, quiet_reload, reset_prefix_cache
from swapq_vllm.gate import close_front, close_worker, open_front, open_worker
from swapq_vllm.ledger import Ledger
from swapq_vllm.served import Served

if TYPE_CHECKING:
    from vllm import LLM

__all__ = [
    "UpdateReport",
    "apply_update",
    "receive",
    "running",
    "served_digests",
    "served_tensors",
    "stacked_experts",
    "verify",
]


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What an update did.

    Attributes:
        seconds: from the reset of the prefix cache until the engine serves again.
        bytes: bytes of the tensors that arrived.
        tensors: how many tensors of the checkpoint arrived. A stack of experts counts as all that it stands for.
        verified: how many of them were read back from the engine and equal what arrived.
        unverified: names whose bytes the engine keeps in a layout that cannot be read back. Never a quantized tensor.
    """

    seconds: float
    bytes: int
    tensors: int
    verified: int
    unverified: tuple[str, ...]


def apply_update(
    llm: "LLM", tensors: Iterable[tuple[str, Tensor]], expected_digests: Mapping[str, str] | None = None
) -> UpdateReport:
    """Replace every weight of an in-process engine and prove that it holds them.

    Args:
        llm: an engine in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``, one worker). Under an external launcher every rank calls
            this for its own engine, with the same tensors.
        tensors: ``(checkpoint name, tensor)``, every tensor of the checkpoint exactly once, in any order (by layer needs the
            least memory). Experts that :func:`stacked_experts` lists may come as stacks instead (``swapq.checkpoint.stacks``), which is
            one copy each. It is consumed lazily; a tensor's storage may be reused as soon as the next one is asked for.
        expected_digests: the sender's digests by the names that it sends. It is read after ``tensors`` is exhausted, so it may be filled
            meanwhile.

    Returns:
        What was done and what was compared.

    Raises:
        SyncError: naming the tensors that are missing, unknown, repeated, of a wrong dtype or shape, not equal to what was sent, or
            holding what no quantizer writes. The engine refuses to serve from then on. While its weights sleep, or a request has
            begun, nothing is touched.
        UnsupportedError: the engine is in another process, or has a KV connector that cannot forget; nothing is touched.
    """
    start = time.perf_counter()
    _require_in_process(llm)
    _require_awake(llm)
    # before the weights change, since a running request would go on with the new ones; none can begin until the engine opens again
    if has_begun_requests(llm) or not reset_prefix_cache(llm):
        raise SyncError(
            "weights cannot change while requests run or wait to go on, old and new ones would mix in them; finish or abort them, then sync"
        )
    close_front(llm, "its last weight update did not complete")
    try:
        arrived, held, unverified, count = llm.collective_rpc(receive, args=(tensors, expected_digests))[0]
    except SyncError as error:
        close_front(llm, str(error))
        raise
    open_front(llm)
    return UpdateReport(time.perf_counter() - start, count, arrived, held, unverified)


def receive(
    worker: Any, tensors: Iterable[tuple[str, Tensor]], expected_digests: Mapping[str, str] | None = None
) -> tuple[int, int, tuple[str, ...], int]:
    """The part of :func:`apply_update` that runs in a vLLM worker.

    Returns:
        Tensors arrived, tensors read back and equal, names not readable, bytes arrived.
    """
    served = Served.of(worker)
    ledger = Ledger(served, expected_digests)
    close_worker(worker, "its last weight update did not complete")
    try:
        served.begin()
        with torch.no_grad():
            if served.takes_copies:
                deque(ledger.stream(tensors), maxlen=0)  # gives nothing on: all is copied
                forget_caches(worker.model_runner)
            else:
                with quiet_reload():
                    worker.reload_weights(weights_iterator=ledger.stream(tensors), is_checkpoint_format=True)
            damage = served.damage(ledger.copied)  # before the comparison, which waits for the device
            held, unverified = ledger.compare_held()
            served.settle(ledger.copied, damage)
        served.require_same_addresses()
    except BaseException as error:
        served.abandon()  # after an interrupt too, or no later update could begin
        if not isinstance(error, Exception):
            raise
        failure = error if isinstance(error, SyncError) else SyncError(ledger.explain(error))
        close_worker(worker, str(failure))
        if failure is error:
            raise
        raise failure from error
    open_worker(worker)
    return ledger.tensors, held, unverified, ledger.bytes


def verify(worker: Any, expected_digests: Mapping[str, str]) -> dict[str, list[str]]:
    """Check a worker after an update that came another way (a server's weight transfer). See :meth:`Served.verify`.

    A worker that holds a wrong tensor, or holds one whose digest the sender did not give, is closed; a right one is opened.
    """
    worker = getattr(worker, "worker", worker)
    found = Served.of(worker).verify(expected_digests)
    if found["wrong"] or found["unsent"]:
        close_worker(worker, f"it does not hold what was sent: {', '.join((found['wrong'] + found['unsent'])[:6])}")
    else:
        open_worker(worker)
    return found


def stacked_experts(llm: "LLM") -> frozenset[str]:
    """Names of the experts modules that may be sent as stacks, ``model.layers.3.mlp.experts``; none where the engine holds no codes."""
    _require_in_process(llm)
    served: Served = llm.collective_rpc(Served.of)[0]
    return served.stacked_experts


def served_tensors(llm: "LLM", *, stacked: bool = False) -> Iterator[tuple[str, Tensor]]:
    """What the engine serves, under checkpoint names and in checkpoint layout, quantized tensors as codes and scales.

    Tensors that cannot be read back (see :attr:`UpdateReport.unverified`) or that another rank holds are left out.

    Args:
        stacked: quantized experts as stacks, under the names of ``swapq.checkpoint.stacks``.
    """
    _require_in_process(llm)
    served: Served = llm.collective_rpc(Served.of)[0]
    return served.tensors(stacked=stacked)


def served_digests(llm: "LLM") -> dict[str, str]:
    """Digests of :func:`served_tensors`, to be compared with those of a model or checkpoint."""
    found = Digests()
    for name, tensor in served_tensors(llm):
        found.add(name, tensor)
    return found.result()


def running(llm: "LLM") -> dict[str, tuple[str, str]]:
    """Checkpoint name of every weight matrix -> formats in which the engine computes it and its rows, for :func:`swapq.diagnostics.audit`.

    Raises:
        UnsupportedError: the engine is in another process.
    """
    _require_in_process(llm)
    served: Served = llm.collective_rpc(Served.of)[0]
    return served.running()


def _require_awake(llm: "LLM") -> None:
    if "weights" in llm.llm_engine.model_executor.sleeping_tags:
        raise SyncError(
            'the engine\'s weights sleep, their memory is not there to be written; call llm.wake_up(tags=["weights"]) first'
        )


def _require_in_process(llm: "LLM") -> None:
    from vllm.v1.engine.core_client import InprocClient

    if not isinstance(llm.llm_engine.engine_core, InprocClient):
        raise UnsupportedError(
            "the engine runs in another process, where tensors of this one cannot go; set VLLM_ENABLE_V1_MULTIPROCESSING=0 before "
            "importing vllm, or send the update through a server's weight transfer and check it with the worker method `swapq_verify`"
        )
