"""What a trainer asks the workers of a vLLM server: which formats they compute in, and whether they hold what was sent."""

from collections.abc import Mapping
from typing import Any

from requests.exceptions import RequestException

from swapq.errors import SyncError

__all__ = ["CannotTell", "running", "verified"]

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


def _ask(client: Any, method: str, what: str, **arguments: Any) -> list[Any]:
    """Every worker's answer to a method of swapq's worker extension."""
    url = f"{client.base_url}/collective_rpc"
    try:
        answer = client.session.post(url, json={"method": method, "kwargs": arguments})
    except RequestException as error:  # the client tries again where a worker has no such method
        raise CannotTell(
            f"the server could not {what} ({type(error).__name__}: {str(error)[:300]}); {_START}"
        ) from error
    if answer.status_code != 200:
        raise CannotTell(f"the server could not {what} ({answer.status_code}: {answer.text[:300]}); {_START}")
    return answer.json()["results"]
