"""vLLM's weight transfer and TRL's client with a file in the place of NCCL, which needs CUDA. All else of server mode stays as it is."""

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from trl.generation.vllm_client import VLLMClient
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors, unpack_tensor

from swapq_vllm.worker import WorkerExtension

__all__ = ["BACKEND", "FileClient", "FileWorker"]

BACKEND = "swapq_test_file"


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """The announcement of NCCL's transfer, and where the packed bytes lie."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    file: str


class FileTransferEngine(NCCLWeightTransferEngine):
    """NCCL's engine, whose life cycle and packing it keeps, reading the packed tensor from a file."""

    init_info_cls = FileInitInfo  # type: ignore[assignment]
    update_info_cls = FileUpdateInfo  # type: ignore[assignment]

    def init_transfer_engine(self, init_info: Any) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # without the wait for an accelerator

    def receive_weights(self, update_info: Any) -> None:
        dtypes = [getattr(torch, name) for name in update_info.dtype_names]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(update_info.shapes, dtypes, strict=True)]
        packed = load_file(update_info.file)["packed"]
        self.model.load_weights(unpack_tensor(packed, update_info.names, update_info.shapes, dtypes, sizes))


class FileWorker(WorkerExtension):
    """vLLM imports this module in its workers, which registers the engine there."""


class FileClient(VLLMClient):
    """TRL's client; as in NCCL's packed transfer, tensors are read when the last has been yielded."""

    def init_communicator(self, device: Any = 0) -> None:
        assert self.get_server_info()["weight_transfer_config"]["backend"] == BACKEND
        self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {}})

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        names, dtype_names, shapes = (list(field) for field in zip(*metadata, strict=True))
        chunk = pack_tensors(iter(named_params), lambda item: item[1], 1 << 30)
        assert chunk is not None
        assert chunk.names == names
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "packed.safetensors")
            save_file({"packed": chunk.packed_tensor}, file)
            info = {"names": names, "dtype_names": dtype_names, "shapes": shapes, "file": file}
            self._start_weight_update()
            self._post(f"{self.base_url}/update_weights", json={"update_info": info})
            self._finish_weight_update()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FileTransferEngine)
