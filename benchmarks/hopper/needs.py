"""What a benchmark cannot do without, said before it starts: what is missing, and what to do."""

import argparse
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import torch

__all__ = ["require", "require_triton"]


def require(parser: argparse.ArgumentParser, *, cuda: bool = True, vllm: str = "") -> None:
    """End the program with exit code 2 where something is missing.

    Args:
        cuda: whether a CUDA device is needed.
        vllm: what needs vLLM, for the message; empty where nothing does.
    """
    if said := "; ".join(_missing(cuda, vllm)):
        parser.error(said)


def _missing(cuda: bool, vllm: str) -> Iterator[str]:
    if cuda and not torch.cuda.is_available():
        build = "" if torch.version.cuda else f", with a PyTorch that is built for CUDA ({torch.__version__} is not)"
        yield f"this times CUDA kernels and there is no CUDA device; run it on a Hopper GPU{build}"
    if vllm and find_spec("vllm") is None:
        yield (
            f"{vllm} needs vLLM and {sys.executable} has none; install one that docs/vllm.md names, or on a CPU use the "
            "environment of `make env`"
        )


def require_triton() -> None:
    """For programs that cannot be imported without Triton: to be called before the imports that need it."""
    if find_spec("triton") is None:
        argparse.ArgumentParser(add_help=False).error(
            f"this times CUDA kernels beside Triton's and {sys.executable} has no Triton; run it on a Hopper GPU, "
            "with a PyTorch that is built for CUDA: Triton comes with it"
        )
