"""Program: one ``.cu`` file of this folder with its constants, compiled at first use and launched on torch's current stream."""

import ctypes
import hashlib
import os
import secrets
from contextlib import suppress
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swapq.errors import SwapqError, UnsupportedError

__all__ = ["Program", "cache_folder", "compile_source", "multiprocessors", "program"]

_HEADERS = (
    "blocks.cuh",
    "bulk_copy.cuh",
    "contract.cuh",
    "dependent.cuh",
    "order.cuh",
    "tensor_core.cuh",
    "weights.cuh",
    "word_sums.cuh",
)


def cache_folder() -> Path | None:
    """Where compiled kernels are kept: ``$SWAPQ_CACHE``, else ``swapq/kernels`` in the user's cache folder; None for a user without one."""
    chosen = os.environ.get("SWAPQ_CACHE")
    if chosen:
        return Path(chosen) / "kernels"
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no HOME and no entry in the password database
        return None
    return base / "swapq" / "kernels"


@cache
def _text(file: str) -> str:
    return resources.files(__package__).joinpath(file).read_text(encoding="utf-8")


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise UnsupportedError(
            f"swapq's CUDA kernels are compiled with cuda-bindings, which does not import ({error}); install the `cuda-bindings` "
            "that your torch asks for, or choose the torch reference with swapq.kernels.dispatch.use('reference')"
        ) from error
    return nvrtc


def compile_source(file: str, architecture: str, constants: tuple[tuple[str, int], ...]) -> bytes:
    """The cubin of ``file`` for ``architecture`` (``"sm_90"``), from the cache if it was compiled before.

    Raises:
        SwapqError: NVRTC refused the source; its log is in the message.
    """
    nvrtc = _nvrtc()
    options = [f"--gpu-architecture={architecture}", "--fmad=false", "-std=c++17"]
    options += [f"-D{name}={value}" for name, value in constants]
    texts = [_text(file), *map(_text, _HEADERS)]
    version = nvrtc.nvrtcVersion()[1:]
    key = hashlib.sha256("\0".join([*texts, *options, str(version)]).encode()).hexdigest()
    folder = cache_folder()
    kept = None if folder is None else folder / f"{Path(file).stem}-{key[:32]}.cubin"
    if found := _kept(kept):
        return found
    names = [name.encode() for name in _HEADERS]
    code, handle = nvrtc.nvrtcCreateProgram(
        texts[0].encode(), file.encode(), len(names), [t.encode() for t in texts[1:]], names
    )
    _require(code, file)
    (code,) = nvrtc.nvrtcCompileProgram(handle, len(options), [o.encode() for o in options])
    if int(code):
        log = b" " * nvrtc.nvrtcGetProgramLogSize(handle)[1]
        nvrtc.nvrtcGetProgramLog(handle, log)
        raise SwapqError(f"{file}: NVRTC {code.name} with {' '.join(options)}\n{log.decode(errors='replace')}")
    code, size = nvrtc.nvrtcGetCUBINSize(handle)
    _require(code, file)
    cubin = b" " * size
    _require(nvrtc.nvrtcGetCUBIN(handle, cubin)[0], file)
    nvrtc.nvrtcDestroyProgram(handle)
    _keep(kept, cubin)
    return cubin


def _kept(path: Path | None) -> bytes | None:
    """A compiled kernel of an earlier process; None where there is none, it cannot be read, or it is damaged."""
    try:
        content = b"" if path is None else path.read_bytes()
    except OSError:
        return None
    digest, cubin = content[:32], content[32:]
    return cubin if cubin and hashlib.sha256(cubin).digest() == digest else None


def _keep(path: Path | None, cubin: bytes) -> None:
    """Store a compiled kernel behind its digest. A cache that cannot be written costs time, nothing else."""
    if path is None:
        return
    content = hashlib.sha256(cubin).digest() + cubin
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()


def _require(code: Any, what: str) -> None:
    if int(code):
        raise SwapqError(f"{what}: {code.name}; the CUDA driver refused it")


class Program:
    """A compiled kernel on one device.

    Args:
        file: name in this folder; the kernel inside is called as the file.
        constants: what the source wants defined.
        device: index of the CUDA device.

    Raises:
        SwapqError: a kernel that is used for the first time while a CUDA graph is captured.
    """

    def __init__(self, file: str, constants: tuple[tuple[str, int], ...], device: int) -> None:
        from cuda.bindings import driver

        if torch.cuda.is_current_stream_capturing():
            raise SwapqError(
                f"{file}: a kernel cannot be loaded while a CUDA graph is captured; run the same shapes once before the capture"
            )
        self._driver, self._device = driver, device
        major, minor = torch.cuda.get_device_capability(device)
        cubin = compile_source(f"{file}.cu", f"sm_{major}{minor}", constants)
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes torch's context the current one
            self._context = driver.cuCtxGetCurrent()[1]
            code, self._module = driver.cuModuleLoadData(cubin)
            _require(code, file)
            code, self._function = driver.cuModuleGetFunction(self._module, file.encode())
            _require(code, file)
        self.file = file

    def allow_shared_memory(self, nbytes: int) -> None:
        """Let a block have ``nbytes`` of dynamic shared memory."""
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _require(self._driver.cuFuncSetAttribute(self._function, attribute, nbytes)[0], self.file)

    def launch(
        self,
        grid: tuple[int, ...],
        threads: int,
        *args: "Tensor | int | float | None",
        shared: int = 0,
        overlap: bool = False,
        together: bool = False,
    ) -> None:
        """Launch on torch's current stream. Tensors go as pointers, None as a null pointer, int and float as 32 bits.

        Args:
            grid: blocks in x, y, z; nothing is launched where one is 0.
            threads: of a block.
            shared: bytes of dynamic shared memory of a block.
            overlap: may begin while the kernel before it ends; for kernels that wait themselves (dependent.cuh).
            together: all blocks are on the GPU at once, or the driver refuses.
        """
        x, y, z = (*grid, 1, 1)[:3]
        if not x * y * z:
            return
        if x >= 1 << 31 or max(y, z) >= 1 << 16:
            raise SwapqError(f"{self.file}: a grid of {grid} blocks is larger than CUDA's; split the tensor")
        for a in args:
            if isinstance(a, Tensor) and a.get_device() != self._device:
                raise SwapqError(
                    f"{self.file}: a tensor {tuple(a.shape)} on {a.device} beside tensors on cuda:{self._device}; move it there first"
                )
        held = [_argument(a) for a in args]
        addresses = (ctypes.c_void_p * len(held))(*[ctypes.addressof(a) for a in held])
        with torch.cuda.device(self._device):
            driver = self._driver
            if not int(driver.cuCtxGetCurrent()[1]):  # a thread of which torch has asked nothing yet
                _require(driver.cuCtxSetCurrent(self._context)[0], self.file)
            stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
            where = (x, y, z, threads, 1, 1, shared, stream)
            if not overlap and not together:
                code = driver.cuLaunchKernel(self._function, *where, ctypes.addressof(addresses), 0)[0]
            else:
                config = _config(driver, where, overlap, together)
                code = driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(addresses), 0)[0]
            _require(code, self.file)


def _config(driver: Any, where: tuple[int, ...], overlap: bool, together: bool) -> Any:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, config.blockDimY, config.blockDimZ = where[:6]
    config.sharedMemBytes, config.hStream = where[6:]
    attributes = []
    ids = driver.CUlaunchAttributeID
    if overlap:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if together:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        attributes.append(attribute)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def _argument(value: "Tensor | int | float | None") -> Any:
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, float):
        return ctypes.c_float(value)
    if not -(1 << 31) <= value < 1 << 31:
        raise SwapqError(f"a kernel's argument {value} does not fit 32 bits; split the tensor")
    return ctypes.c_int(value)


@lru_cache(maxsize=512)
def _program(file: str, device: int, constants: tuple[tuple[str, int], ...]) -> Program:
    return Program(file, constants, device)


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device: a grid that stays on the GPU as a whole is a multiple of them."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def program(file: str, device: torch.device, **constants: int) -> Program:
    """The kernel ``file`` with its constants on ``device``, compiled once."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _program(file, index, tuple(sorted(constants.items())))
