"""What a trainer asks a vLLM server beside TRL's requests.

Its workers: which formats they compute in, and whether they hold what was sent. The server: to rest and to forget, for an update.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from swapq.errors import SyncError, UnsupportedError

__all__ = ["CannotTell", "require_forgetting", "resting", "running", "verified"]

logger = logging.getLogger(__name__)

_START = "start it with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls swapq_vllm.worker.WorkerExtension"


class CannotTell(SyncError):
    """The server's workers have not swapq's extension, or cannot be asked."""


def running(client: Any) -> dict[str, tuple[str, str]]:
    """Checkpoint name of every weight matrix -> formats in which the server computes it and its rows.

    Args:
        client: TRL's `VLLMClient`.

    Raises:
        CannotTell: the server's workers have not swapq's extension.
        SyncError: its workers do not agree.
    """
    found: dict[str, tuple[str, str]] = {}
    for rank, answer in enumerate(_ask(client, "swapq_running", "say what it computes in")):
        for name, (weight, rows) in answer.items():
            if found.setdefault(name, (weight, rows)) != (weight, rows):
                raise SyncError(
                    f"{name} runs as {(weight, rows)} in worker {rank} of the server and as {found[name]} in another; restart the server"
                )
    return found


def verified(client: Any, digests: Mapping[str, str]) -> int:
    """How many tensors of the server's workers have the digests of what was sent.

    Raises:
        CannotTell: the server's workers have not swapq's extension.
        SyncError: a worker holds something else, by name.
    """
    workers = _ask(client, "swapq_verify", "verify the weights it was sent", expected_digests=dict(digests))
    for rank, found in enumerate(workers):
        bad = [name for kind in ("wrong", "unsent", "unknown") for name in found[kind]]
        if bad:
            raise SyncError(f"worker {rank} of the server does not hold what was sent: {', '.join(bad[:6])}")
    return len({name for found in workers for name in found["equal"]})


def require_forgetting(client: Any) -> None:
    """Refuse a server with a KV connector that would bring back, after an update, what the old weights computed.

    Raises:
        UnsupportedError: a connector that cannot be emptied, or a vLLM that does not say whether it was.
        CannotTell: there is a connector, and the server's workers have not swapq's extension.
    """
    transfer = client.get_server_info().get("kv_transfer_config") or {}
    connector = transfer.get("kv_connector")
    if connector is None:
        return
    for names in _ask(client, "swapq_keeping", f"say whether its KV connector, {connector}, can be emptied"):
        for name in names:
            raise UnsupportedError(
                f"the server's KV connector, {name}, has no reset_cache(): after a weight update it would bring back keys and values "
                "of the old weights; start the server without it"
            )
    if _emptied(client) is None:
        raise UnsupportedError(
            f"the server has a KV connector, {connector}, and its vLLM does not say whether emptying it succeeded; use vLLM 0.26 or "
            "later, or start the server without it"
        )


@contextmanager
def resting(client: Any) -> Iterator[None]:
    """Meanwhile the server computes nothing and has forgotten what it computed: for an update of its weights.

    Requests that run are finished first, with the weights they began with; those that come wait. After an error inside, the server keeps
    resting, since it may hold half an update.

    Raises:
        SyncError: the server does not rest or did not empty its caches. Nothing was sent; it goes on with the weights it has, unless it
            was resting already, as after half an update.
    """
    rested = _request(client, "get", "is_paused", "say whether it is paused").json()["is_paused"]
    try:
        # emptying by `pause` itself has no answer before vLLM 0.26
        _request(client, "post", "pause?mode=wait&clear_cache=false", "finish its requests and rest")
        _request(client, "post", "reset_encoder_cache", "empty its encoder cache")
        if _emptied(client) is False:
            raise SyncError(
                "the server did not empty its caches (prefix cache, KV connector), so nothing was sent: they would bring back keys and "
                "values of the old weights. Sync again; if it fails again start the server without the connector"
            )
    except BaseException:  # an interrupt too
        if not rested:
            _request(client, "post", "resume", "go on")
        raise
    try:
        yield
    except BaseException:
        logger.error(
            "%s stays paused, since it may hold half an update: requests wait until a sync lands whole, or until a POST to /resume",
            client.base_url,
        )
        raise
    _request(client, "post", "resume", "go on")


def _emptied(client: Any) -> bool | None:
    """Whether the server emptied its prefix cache and that of a KV connector; None where its vLLM does not say (before 0.26)."""
    answer = _request(client, "post", "reset_prefix_cache?reset_external=true", "empty its caches")
    return answer.json()["success"] if answer.text else None


def _ask(client: Any, method: str, what: str, **arguments: Any) -> list[Any]:
    """Every worker's answer to a method of swapq's worker extension."""
    body = {"method": method, "kwargs": arguments}
    # after a failure the client tries again, also where a worker has no such method
    return _request(client, "post", "collective_rpc", what, CannotTell, f"; {_START}", json=body).json()["results"]


def _request(
    client: Any, method: str, path: str, what: str, failure: type[SyncError] = SyncError, advice: str = "", **body: Any
) -> Any:
    """The answer to a request, after the retries of TRL's session; ``failure`` with ``advice`` at its end is raised without one."""
    try:
        answer = getattr(client.session, method)(f"{client.base_url}/{path}", **body)
    except OSError as error:  # every error of requests, which only TRL's client needs, is one
        raise failure(f"the server could not {what} ({type(error).__name__}: {str(error)[:300]}){advice}") from error
    if answer.status_code != 200:
        raise failure(f"the server could not {what} ({answer.status_code}: {answer.text[:300]}){advice}")
    return answer
