"""Schemes of layout ``compressed-tensors``: what each format is called there, its arguments, its tensors, and how codes become them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from swapq import formats
from swapq.checkpoint.layouts.base import part_shapes
from swapq.errors import UnsupportedError
from swapq.formats import Format, Parts
from swapq.kernels import cpu
from swapq.kernels.cpu import Empty

__all__ = ["SCHEMES", "Scheme", "format_named"]


class Scheme(ABC):
    """One format in compressed-tensors' words. Tensors are named without their module."""

    #: swapq's format
    fmt: str
    #: ``format`` of a config or config group
    name: ClassVar[str]

    @property
    def form(self) -> Format:
        """swapq's format object."""
        return formats.get(self.fmt)

    @property
    @abstractmethod
    def weights(self) -> dict[str, Any]:
        """Arguments of the weights."""

    @property
    def activations(self) -> dict[str, Any] | None:
        """Arguments of the input activations; None where they stay as they are."""
        return self.weights | {"dynamic": True}

    @abstractmethod
    def stored(self, matrix: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of every tensor of an ``[N, K]`` weight, the codes first."""

    @abstractmethod
    def encode(self, parts: Parts, empty: Empty | None = None) -> dict[str, Tensor]:
        """Tensors from codes and scales."""

    @abstractmethod
    def decode(self, tensors: Mapping[str, Tensor]) -> Parts:
        """Codes and scales from tensors."""

    def reads(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the arguments of weights, as a config of this name gives them, mean this format."""
        return True


class _MXFP8(Scheme):
    fmt, name = "mxfp8", "mxfp8-quantized"
    weights: ClassVar[dict[str, Any]] = {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "symmetric": True,
        "dynamic": False,
        "group_size": 32,
        "scale_dtype": "torch.uint8",
    }

    def stored(self, matrix: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        shapes = part_shapes(self.fmt, matrix)
        return {"weight": (torch.float8_e4m3fn, shapes["codes"]), "weight_scale": (torch.uint8, shapes["scales"])}

    def encode(self, parts: Parts, empty: Empty | None = None) -> dict[str, Tensor]:
        return {"weight": parts.codes, "weight_scale": parts.scales}

    def decode(self, tensors: Mapping[str, Tensor]) -> Parts:
        return Parts(tensors["weight"], tensors["weight_scale"])


class _NVFP4(Scheme):
    """The global scale is stored inverted (2688 / amax, a divisor) with shape [1]; ``input_global_scale`` is the neutral 1.0."""

    fmt, name = "nvfp4", "nvfp4-pack-quantized"
    weights: ClassVar[dict[str, Any]] = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "symmetric": True,
        "dynamic": False,
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
    }

    @property
    def activations(self) -> dict[str, Any]:
        return self.weights | {"dynamic": "local"}

    def stored(self, matrix: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        shapes = part_shapes(self.fmt, matrix)
        return {
            "weight_packed": (torch.uint8, shapes["codes"]),
            "weight_scale": (torch.float8_e4m3fn, shapes["scales"]),
            "weight_global_scale": (torch.float32, (1,)),
            "input_global_scale": (torch.float32, (1,)),
        }

    def encode(self, parts: Parts, empty: Empty | None = None) -> dict[str, Tensor]:
        if parts.global_scale is None:
            raise TypeError("nvfp4 parts carry a global scale")
        scale = parts.global_scale.reshape(1)
        return {
            "weight_packed": parts.codes,
            "weight_scale": parts.scales,
            "weight_global_scale": torch.div(torch.ones_like(scale), scale),
            "input_global_scale": torch.ones_like(scale),
        }

    def decode(self, tensors: Mapping[str, Tensor]) -> Parts:
        inverse = tensors["weight_global_scale"].float().reshape(())
        decode = torch.div(torch.ones_like(inverse), inverse)
        return Parts(tensors["weight_packed"], tensors["weight_scale"], decode)


class _FP8Block(Scheme):
    fmt, name = "fp8_block", "float-quantized"
    weights: ClassVar[dict[str, Any]] = {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "symmetric": True,
        "dynamic": False,
        "block_structure": [128, 128],
    }

    @property
    def activations(self) -> dict[str, Any]:
        rows = {k: v for k, v in self.weights.items() if k != "block_structure"}
        return rows | {"strategy": "group", "dynamic": True, "group_size": 128}

    def stored(self, matrix: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        shapes = part_shapes(self.fmt, matrix)
        return {"weight": (torch.float8_e4m3fn, shapes["codes"]), "weight_scale": (torch.float32, shapes["scales"])}

    def encode(self, parts: Parts, empty: Empty | None = None) -> dict[str, Tensor]:
        return {"weight": parts.codes, "weight_scale": parts.scales}

    def decode(self, tensors: Mapping[str, Tensor]) -> Parts:
        return Parts(tensors["weight"], tensors["weight_scale"].float())

    def reads(self, arguments: Mapping[str, Any]) -> bool:
        return arguments.get("strategy") == "block" and list(arguments.get("block_structure") or ()) == [128, 128]


class _INT4(Scheme):
    """Eight codes in an int32, the first lowest, each stored as ``code + 8``."""

    name = "pack-quantized"

    def __init__(self, fmt: str) -> None:
        self.fmt, self.group = fmt, formats.get(fmt).block

    @property
    def weights(self) -> dict[str, Any]:
        fixed = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "dynamic": False}
        return fixed | {"group_size": self.group}

    @property
    def activations(self) -> None:
        return None

    def stored(self, matrix: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        n, k = matrix
        return {
            "weight_packed": (torch.int32, (n, -(-k // 8))),
            "weight_scale": (torch.bfloat16, (n, k // self.group)),
            "weight_shape": (torch.int64, (2,)),
        }

    def encode(self, parts: Parts, empty: Empty | None = None) -> dict[str, Tensor]:
        # two's complement to ``code + 8``, in both halves of a byte
        packed = cpu.stored(parts, self.fmt, empty).codes.bitwise_xor_(0x88)
        shape = torch.tensor(parts.codes.shape, dtype=torch.int64, device="cpu")
        return {"weight_packed": packed.view(torch.int32), "weight_scale": parts.scales, "weight_shape": shape}

    def decode(self, tensors: Mapping[str, Tensor]) -> Parts:
        packed = tensors["weight_packed"].contiguous().view(torch.uint8)
        codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
        return Parts(codes.to(torch.int8) - 8, tensors["weight_scale"].to(torch.bfloat16))

    def reads(self, arguments: Mapping[str, Any]) -> bool:
        plain = not arguments.get("actorder") and arguments.get("symmetric", True)
        kind = arguments.get("num_bits"), arguments.get("type", "int"), arguments.get("group_size")
        return bool(plain) and kind == (4, "int", self.group)


SCHEMES: Mapping[str, Scheme] = {s.fmt: s for s in (_MXFP8(), _NVFP4(), _FP8Block(), _INT4("int4"), _INT4("int4_g32"))}


def format_named(name: object, arguments: Mapping[str, Any]) -> str:
    """swapq's format of a config group.

    Args:
        name: its ``format``.
        arguments: its ``weights``.

    Raises:
        UnsupportedError: one that swapq does not read.
    """
    for scheme in SCHEMES.values():
        if scheme.name == name and scheme.reads(arguments):
            return scheme.fmt
    known = ", ".join(dict.fromkeys(s.name for s in SCHEMES.values()))
    if any(scheme.name == name for scheme in SCHEMES.values()):
        raise UnsupportedError(
            f"config.json: compressed-tensors format {name!r} with weights {dict(arguments)}; swapq reads FP8 in blocks of [128, 128] and "
            "symmetric INT4 in groups of 128 or 32"
        )
    raise UnsupportedError(f"config.json: compressed-tensors format is {name!r}; swapq reads {known}")
