"""A vLLM engine in a process of its own, in which tests run functions. One engine per process: a second one can fail."""

import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.helpers.warm import ENVIRONMENT, context

__all__ = ["Engine", "EngineError"]

_ENVIRONMENT = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def _serve(pipe: Connection, model: str | None, options: dict[str, Any]) -> None:
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    llm = None
    try:
        if model is not None:
            from vllm import LLM

            llm = LLM(model=model, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=16, seed=0, **options)
        pipe.send((True, None))
    except BaseException as error:  # noqa: BLE001 - the parent gets it
        pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        return
    while (job := pipe.recv()) is not None:
        function, arguments = job
        try:
            result = (True, function(llm, *arguments))
            pickle.dumps(result)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            result = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        pipe.send(result)


class EngineError(Exception):
    """What a function raised in the engine's process."""


class Engine:
    """``engine(function, *arguments)`` runs ``function(llm, *arguments)`` in the engine's process."""

    def __init__(self, model: str | os.PathLike[str] | None, *, daemon: bool = True, **options: Any) -> None:
        start: Any = context()
        self.pipe, theirs = start.Pipe()
        self.process = start.Process(
            target=_serve, args=(theirs, None if model is None else str(model), options), daemon=daemon
        )
        self.process.start()
        theirs.close()
        self._answer()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.pipe.send((function, arguments))
        return self._answer()

    def _answer(self, seconds: float = 420) -> Any:
        if not self.pipe.poll(seconds):
            raise EngineError(f"no answer in {seconds} s")
        good, value = self.pipe.recv()
        if not good:
            raise EngineError(value)
        return value

    def close(self) -> None:
        """Stop the process. Closing twice is fine."""
        if self.pipe.closed:
            return
        if self.process.is_alive():
            self.pipe.send(None)
        self.pipe.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()
