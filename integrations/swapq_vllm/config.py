"""The plugin's quantization configuration: which layer has which format comes from the checkpoint's exact list and nothing else."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from swapq.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.models.utils import WeightsMapper

__all__ = ["SwapqConfig"]

# merged linears that a model class may not list in `packed_modules_mapping`
_MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class SwapqConfig(QuantizationConfig):
    """``quantization_config`` of a checkpoint in swapq's layout; without arguments, a BF16 checkpoint."""

    def __init__(self, recipe: Mapping[str, Any] | None = None, quantized: Mapping[str, list[str]] | None = None) -> None:
        super().__init__()
        self.recipe = dict(recipe or {"name": "bf16"})
        #: checkpoint name of every quantized weight -> format
        self.formats = {name: fmt for fmt, names in (quantized or {}).items() for name in names}
        #: the engine's name of each of them -> checkpoint name
        self.names = {name: name for name in self.formats}
        self.claimed: set[str] = set()

    @classmethod
    def get_name(cls) -> str:  # type: ignore[override]
        return "swapq"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:  # type: ignore[override]
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SwapqConfig":
        """Read ``quantization_config``.

        Raises:
            UnsupportedError: another version or layout, or a format that the engine does not run.
            CheckpointError: an entry that is not what it should be, or a weight listed under two formats.
        """
        version, layout = config.get("version"), config.get("layout")
        if version != 1 or layout != "swapq":
            raise UnsupportedError(f"quantization_config has version {version!r} and layout {layout!r}; this plugin reads version 1, layout 'swapq'")
        recipe, quantized = config.get("recipe"), config.get("quantized")
        if not isinstance(recipe, dict) or not isinstance(quantized, dict):
            raise CheckpointError("quantization_config needs the objects `recipe` and `quantized`; export the checkpoint again")
        seen: dict[str, str] = {}
        for fmt, names in quantized.items():
            if fmt not in ("nvfp4", "mxfp8"):
                raise UnsupportedError(f"quantization_config lists weights in format {fmt!r}; this plugin runs nvfp4 and mxfp8")
            for name in names:
                if name in seen:
                    raise CheckpointError(f"{name}: quantization_config lists it twice, as {seen[name]} and as {fmt}; export the checkpoint again")
                if not name.endswith(".weight"):
                    raise CheckpointError(f"{name}: quantization_config lists it, but quantized weights end in '.weight'; export the checkpoint again")
                seen[name] = fmt
        return cls(recipe, quantized)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: "WeightsMapper") -> None:
        """Rename the listed weights as the model class renames its modules. A name that the model drops stays, and is refused later."""
        self.names = {(hf_to_vllm_mapper.apply_list([name]) or [name])[0]: hub for name, hub in self.names.items()}

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Check the headers of a local checkpoint against the list, before anything is built."""
        if os.path.isdir(model_name):
            from swapq_vllm.headers import check_headers, read_headers

            check_headers(read_headers(model_name), self.formats)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> "QuantizeMethodBase | None":
        """The method that runs ``layer``."""
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        from swapq_vllm.unquantized import Bf16EmbeddingMethod, Bf16ExpertsMethod, Bf16LinearMethod

        if isinstance(layer, RoutedExperts):
            return Bf16ExpertsMethod(layer.moe_config)
        if isinstance(layer, LinearBase):
            return Bf16LinearMethod()
        if isinstance(layer, VocabParallelEmbedding):
            return Bf16EmbeddingMethod()
        return None
