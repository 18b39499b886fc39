"""Triton kernels compiled without a GPU."""

from collections.abc import Iterable
from typing import Any

__all__ = ["compiled", "pointers"]


def pointers(signature: dict[str, str]) -> list[str]:
    """Names of the tensors among the arguments."""
    return [name for name, kind in signature.items() if kind[0] == "*"]


def compiled(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    aligned: Iterable[str] = (),
    **options: Any,
) -> Any:
    """What Triton makes of a kernel.

    Args:
        signature: type of each argument that is no constant.
        aligned: arguments that are multiples of 16, or begin at such addresses, as at a launch.
        options: of the compilation: ``num_warps``, ``num_stages``, ``enable_fp_fusion``.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    places = {(list(signature).index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants, places)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
