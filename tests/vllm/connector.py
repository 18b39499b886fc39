"""A KV connector that keeps keys and values in a folder, and can empty it. vLLM's example cannot."""

import shutil
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

__all__ = ["ForgettingConnector"]


class ForgettingConnector(ExampleConnector):
    #: a file of this name in the folder keeps it from being emptied
    LOCK = "locked"

    def reset_cache(self) -> bool:
        if (Path(self._storage_path) / self.LOCK).exists():
            return False
        for entry in Path(self._storage_path).iterdir():
            shutil.rmtree(entry)
        return True
