"""Closes an engine whose weights are not known to be right, and opens it again. A closed engine raises instead of serving."""

from typing import TYPE_CHECKING, Any, NoReturn

from swapq.errors import SyncError

if TYPE_CHECKING:
    from vllm import LLM

__all__ = ["close_front", "close_worker", "open_front", "open_worker"]

# Attributes of one instance hide the class's methods, and deleting them brings the methods back.


def _refusal(reason: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise SyncError(f"the engine does not serve: {reason}. Send a complete update first")

    return refuse


def close_front(llm: "LLM", reason: str) -> None:
    """Refuse new requests to ``llm`` before its scheduler sees them."""
    llm.llm_engine.add_request = _refusal(reason)  # type: ignore[method-assign]


def open_front(llm: "LLM") -> None:
    """Accept requests again."""
    llm.llm_engine.__dict__.pop("add_request", None)


def close_worker(worker: Any, reason: str) -> None:
    """Refuse forward passes in the worker, whatever way requests came in."""
    worker.model_runner.execute_model = _refusal(reason)


def open_worker(worker: Any) -> None:
    """Allow forward passes again."""
    worker.model_runner.__dict__.pop("execute_model", None)
