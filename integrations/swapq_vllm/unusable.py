"""The configuration registered when the plugin cannot be used: it says why when a swapq checkpoint is opened."""

from typing import Any, NoReturn

from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from swapq.errors import UnsupportedError

__all__ = ["unusable_config"]


def unusable_config(reason: Exception) -> type[QuantizationConfig]:
    """A configuration class whose every use raises ``reason``."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            f"this checkpoint needs swapq_vllm, which cannot be used in this installation: {reason}"
        ) from reason

    members = ("get_name", "get_supported_act_dtypes", "get_quant_method", "__init__")
    static: dict[str, Any] = {name: refuse for name in members}
    static |= {name: staticmethod(refuse) for name in ("get_config_filenames", "from_config", "get_min_capability")}
    return type("UnusableSwapqConfig", (QuantizationConfig,), static)
