"""Methods for the workers of a server: ``vllm serve ... --worker-extension-cls swapq_vllm.worker.WorkerExtension``."""

from swapq.digest import Digests
from swapq_vllm.compat import keeping_connectors, worker_connector
from swapq_vllm.receiver import verify
from swapq_vllm.served import Served

__all__ = ["WorkerExtension"]


class WorkerExtension:
    """What a sender calls through ``collective_rpc`` after ``finish_weight_update``, since a server checks nothing itself."""

    def swapq_verify(self, expected_digests: dict[str, str]) -> dict[str, list[str]]:
        """Compare what this worker holds with the sender's digests; a worker that differs stops serving."""
        return verify(self, expected_digests)

    def swapq_running(self) -> dict[str, tuple[str, str]]:
        """Formats in which this worker computes each weight matrix and its rows, for :func:`swapq.diagnostics.audit`."""
        return Served.of(self).running()

    def swapq_keeping(self) -> list[str]:
        """Names of this worker's KV connectors that cannot be emptied, and would bring back what old weights computed."""
        return keeping_connectors(worker_connector())

    def swapq_digests(self) -> dict[str, str]:
        """Digests of every tensor that this worker holds whole, under checkpoint names."""
        found = Digests()
        for name, tensor in Served.of(self).tensors():
            found.add(name, tensor)
        return found.result()
