"""The plugin's quantization configuration: which layer has which format comes from the checkpoint's exact list and nothing else."""

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from swapq import formats
from swapq.anatomy.names import role_of
from swapq.errors import CheckpointError, UnsupportedError
from swapq.recipe_rules import FORMATS

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.models.utils import WeightsMapper

__all__ = ["SwapqConfig"]

_SHARDS = {"gate_proj": "w1", "w1": "w1", "up_proj": "w3", "w3": "w3", "down_proj": "w2", "w2": "w2"}
# merged linears that a model class may not list in `packed_modules_mapping`
_MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class SwapqConfig(QuantizationConfig):
    """``quantization_config`` of a checkpoint in swapq's layout; without arguments, a BF16 checkpoint."""

    def __init__(
        self, recipe: Mapping[str, Any] | None = None, quantized: Mapping[str, list[str]] | None = None
    ) -> None:
        super().__init__()
        self.recipe = dict(recipe or {"name": "bf16"})
        #: checkpoint name of every quantized weight -> format
        self.formats = {name: fmt for fmt, names in (quantized or {}).items() for name in names}
        #: the engine's name of each of them -> checkpoint name
        self.names = {name: name for name in self.formats}
        self.claimed: set[str] = set()
        self.to_download: tuple[str, str | None] | None = None

    @classmethod
    def get_name(cls) -> str:  # type: ignore[override]
        return "swapq"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
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
            raise UnsupportedError(
                f"quantization_config has version {version!r} and layout {layout!r}; this plugin reads version 1, layout 'swapq'"
            )
        recipe, quantized = config.get("recipe"), config.get("quantized")
        if not isinstance(recipe, dict) or not isinstance(quantized, dict):
            raise CheckpointError(
                "quantization_config needs the objects `recipe` and `quantized`; export the checkpoint again"
            )
        seen: dict[str, str] = {}
        for fmt, names in quantized.items():
            if fmt not in formats.names():
                raise UnsupportedError(
                    f"quantization_config lists weights in format {fmt!r}; this plugin runs {', '.join(formats.names())}"
                )
            if FORMATS[fmt].no_rollout and not recipe.get("force_rollout"):
                raise UnsupportedError(
                    f"quantization_config lists weights in format {fmt!r}, which is not for rollouts: {FORMATS[fmt].no_rollout}; convert "
                    "with another recipe, or with force_rollout"
                )
            for name in names:
                if name in seen:
                    raise CheckpointError(
                        f"{name}: quantization_config lists it twice, as {seen[name]} and as {fmt}; export the checkpoint again"
                    )
                if not name.endswith(".weight"):
                    raise CheckpointError(
                        f"{name}: quantization_config lists it, but quantized weights end in '.weight'; export the checkpoint again"
                    )
                seen[name] = fmt
        return cls(recipe, quantized)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: "WeightsMapper") -> None:
        """Rename the listed weights as the model class renames its modules. A name that the model drops stays, and is refused later."""
        self.names = {(hf_to_vllm_mapper.apply_list([name]) or [name])[0]: hub for name, hub in self.names.items()}

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Check the checkpoint's headers against the list: of a local folder before anything is built, else once it is downloaded."""
        if os.path.isdir(model_name):
            from swapq_vllm.headers import check_headers, read_headers

            check_headers(read_headers(model_name), self.formats)
        else:
            self.to_download = model_name, revision

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> "QuantizeMethodBase | None":
        """The method that runs ``layer``: quantized if the list names its weights, else BF16.

        Raises:
            UnsupportedError: the list gives parts of one layer different formats, or a format that this kind of layer has not.
        """
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        from swapq_vllm.experts_method import SwapqExpertsMethod
        from swapq_vllm.linear_method import SwapqLinearMethod
        from swapq_vllm.unquantized import Bf16EmbeddingMethod, Bf16ExpertsMethod, Bf16LinearMethod

        if isinstance(layer, RoutedExperts):
            names = self._experts_of(prefix)
            if not names:
                return self._mine(Bf16ExpertsMethod(layer.moe_config))
            moe = layer.moe_config
            shards = ("w1", "w2", "w3") if moe.is_act_and_mul else ("w1", "w2")
            wanted = [(expert, shard) for expert in range(moe.num_logical_experts) for shard in shards]
            fmt = self._one_format(
                prefix, [names.get(slot) for slot in wanted], f"{len(names)} of {len(wanted)} experts' weights"
            )
            self._claim(names.values())
            method = SwapqExpertsMethod(
                moe,
                prefix=prefix,
                fmt=fmt,
                activations=self.activations_of(next(iter(names.values()))),
                expert_tp=self.expert_tp,
                names=names,
            )
            return self._mine(method)
        if isinstance(layer, LinearBase):
            shards_of = self._shards_of(prefix)
            if not any(shards_of.values()):
                return self._mine(Bf16LinearMethod())
            fmt = self._one_format(prefix, list(shards_of.values()), "some of its parts")
            if formats.get(fmt).shares_scale:
                raise UnsupportedError(
                    f"{prefix}: quantization_config lists it as {fmt}, whose FP32 scale spans a whole weight; linears outside routed "
                    "experts run in mxfp8, fp8_block and int4"
                )
            linear_names = {shard: name for shard, name in shards_of.items() if name is not None}
            activations = {self.activations_of(name) for name in linear_names.values()}
            if len(activations) > 1:
                raise UnsupportedError(
                    f"{prefix}: the recipe gives the rows of its parts {' and '.join(sorted(activations))}; one layer of the engine "
                    "quantizes its rows once, so give all parts one format and export again"
                )
            self._claim(linear_names.values())
            return self._mine(
                SwapqLinearMethod(prefix=prefix, fmt=fmt, activations=activations.pop(), names=linear_names)
            )
        if isinstance(layer, VocabParallelEmbedding):
            return self._mine(Bf16EmbeddingMethod())
        return None

    def built(self) -> None:
        """Called by every method once weights are loaded, when all layers exist: every listed weight must have found its layer.

        Raises:
            CheckpointError: naming a listed weight that no layer runs quantized.
        """
        from vllm.distributed import get_pp_group

        from swapq_vllm.headers import check_downloaded

        if self.to_download is not None:
            check_downloaded(*self.to_download, self.formats)
            self.to_download = None
        rest = sorted(set(self.formats) - self.claimed)
        if rest and get_pp_group().world_size == 1:  # with pipeline parallelism other ranks have the other layers
            raise CheckpointError(
                f"quantization_config lists {len(rest)} weights that no layer of this model runs quantized, first {rest[0]}; "
                "routers, embeddings and the LM head are never quantized, and other names must be the model's own"
            )

    def activations_of(self, weight: str) -> str:
        """Format of the rows in front of a listed weight, by its checkpoint name."""
        given: str | Mapping[str, str] = self.recipe.get("activations", "bf16")
        return given if isinstance(given, str) else given.get(role_of(weight), "bf16")

    @property
    def expert_tp(self) -> int:
        return self.recipe.get("expert_tp", 1)

    def _mine(self, method: Any) -> Any:
        method.config = self
        return method

    def _claim(self, names: Iterable[str]) -> None:
        self.claimed.update(names)

    def _experts_of(self, prefix: str) -> dict[tuple[int, str], str]:
        """``(expert, shard)`` to checkpoint name of the listed weights under ``prefix``."""
        found = {}
        for name, hub in self.names.items():
            if name.startswith(f"{prefix}."):
                parts = name[len(prefix) + 1 :].split(".")
                if len(parts) == 3 and parts[0].isdigit() and parts[1] in _SHARDS:
                    found[int(parts[0]), _SHARDS[parts[1]]] = hub
        ungated = found and not any(shard == "w1" for _, shard in found)
        return {(e, "w1" if shard == "w3" else shard): hub for (e, shard), hub in found.items()} if ungated else found

    def _shards_of(self, prefix: str) -> dict[Any, str | None]:
        """Shard id to checkpoint name, None for a shard that is not listed."""
        parent, _, leaf = prefix.rpartition(".")
        if f"{prefix}.weight" in self.names:
            return {None: self.names[f"{prefix}.weight"]}
        members = self.packed_modules_mapping.get(leaf) or _MERGED.get(leaf) or []
        ids: Iterable[Any] = ("q", "k", "v") if leaf == "qkv_proj" else range(len(members))
        return {i: self.names.get(f"{parent}.{member}.weight") for i, member in zip(ids, members, strict=False)}

    def _one_format(self, prefix: str, names: list[str | None], listed: str) -> str:
        found = {None if name is None else self.formats[name] for name in names}
        if len(found) != 1 or None in found:
            kinds = " and ".join(sorted("bf16" if fmt is None else fmt for fmt in found))
            raise UnsupportedError(
                f"{prefix}: quantization_config mixes {kinds} in one layer of the engine ({listed} are listed); "
                "give all parts one format in the recipe and export again"
            )
        return next(fmt for fmt in found if fmt is not None)
