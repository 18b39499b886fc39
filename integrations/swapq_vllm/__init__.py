"""swapq's side of vLLM: serves a swapq checkpoint with the trainer's own expert block, and receives verified weight updates.

vLLM finds :func:`register` through the entry-point group ``vllm.general_plugins`` and calls it in every process. Updates go through
:mod:`swapq_vllm.receiver`.
"""

import importlib.util
import logging

from swapq.errors import MissingPackageError

__all__ = ["register"]

if importlib.util.find_spec("vllm") is None:
    raise MissingPackageError(
        "swapq_vllm needs vLLM 0.25 to 0.31, which is not installed; how depends on the machine: "
        "https://docs.vllm.ai/en/latest/getting_started/installation/"
    )

_logger = logging.getLogger("swapq_vllm")
_registered = False


def register() -> None:
    """Make ``quantization_config.quant_method: swapq`` known to vLLM. Calling it again changes nothing.

    A plugin that cannot be used here still registers the name, with a configuration that raises the reason when a swapq checkpoint is
    opened: otherwise the user would only read "Unknown quantization method", and other models would not start.
    """
    global _registered
    if _registered:
        return
    _registered = True
    from vllm.model_executor.layers.quantization import register_quantization_config

    try:
        from swapq_vllm.compat import require_supported
        from swapq_vllm.config import SwapqConfig

        require_supported()
        config: type = SwapqConfig
    except Exception as error:
        from swapq_vllm.unusable import unusable_config

        _logger.error("swapq_vllm cannot be used in this installation: %s", error, exc_info=True)
        config = unusable_config(error)
    register_quantization_config("swapq")(config)
