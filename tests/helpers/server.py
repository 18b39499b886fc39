"""`vllm serve` of an export, as `docs/trl.md` starts it for a trainer in server mode."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import requests

from tests.helpers.warm import ENVIRONMENT, ROOT

__all__ = ["Server", "free_port"]

EXTENSION = "swapq_vllm.worker.WorkerExtension"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server in processes of its own; it starts in the constructor and serves when :meth:`wait` returns.

    Args:
        folder: an export with a tokenizer beside it.
        environment: more variables for the server.
        options: more arguments of `vllm serve`.
        backend: vLLM's name of the weight transfer.
        extension: class that vLLM mixes into its workers.
    """

    def __init__(
        self,
        folder: Path,
        *,
        environment: Mapping[str, str],
        options: Sequence[str] = (),
        backend: str = "nccl",
        extension: str = EXTENSION,
    ) -> None:
        port = free_port()
        self.url, self.log, self.started = f"http://127.0.0.1:{port}", folder / "server.log", time.monotonic()
        # what `vllm serve` runs; the command itself asks for a package called vllm, which the CPU's build is not
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command += [
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--weight-transfer-config",
            f'{{"backend": "{backend}"}}',
        ]
        command += [
            "--logprobs-mode",
            "processed_logprobs",
            "--max-logprobs",
            "-1",
            "--worker-extension-cls",
            extension,
        ]
        command += ["--dtype", "bfloat16", "--enforce-eager", *options]
        path = os.pathsep.join([str(ROOT), str(ROOT / "integrations"), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": "127.0.0.1", "PYTHONPATH": path}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **ENVIRONMENT, **own, **environment},
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, seconds: float = 240) -> float:
        """Wait until the server answers; the seconds since it was started.

        Raises:
            AssertionError: it ended, or does not answer in time; with the end of its log.
        """
        while time.monotonic() - self.started < seconds:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}\n{self.said()}")
            try:
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return time.monotonic() - self.started
            except requests.RequestException:
                pass
            time.sleep(0.5)
        raise AssertionError(f"the server did not answer in {seconds:.0f} s\n{self.said()}")

    def said(self, size: int = 5000) -> str:
        """What the server printed around its first error, which later ones hide, and at the end."""
        log = self.log.read_text(errors="replace")
        first = log.find("Traceback")
        return (f"{log[first : first + size]}\n...\n" if 0 <= first < len(log) - size else "") + log[-size:]

    def close(self) -> None:
        """Stop the server and what it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
