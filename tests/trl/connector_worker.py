"""A worker of a server whose KV connector can be made one without `reset_cache`."""

from tests.trl.file_transfer import FileWorker
from tests.vllm.connector import ForgettingConnector

__all__ = ["ConnectorWorker"]


class ConnectorWorker(FileWorker):
    def connector_keeps(self) -> None:
        del ForgettingConnector.reset_cache
