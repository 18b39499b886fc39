"""Families: how each ``model_type`` lays out its experts and spells its names. A family that is not here is refused by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swapq.anatomy.config import integer

__all__ = ["FAMILIES", "MODULE_LIST", "Family"]


def _every(config: Mapping[str, Any], layer: int) -> bool:
    return True


def _sparse_step(config: Mapping[str, Any], layer: int) -> bool:
    step = integer(config, "decoder_sparse_step") or 1
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % step == 0


def _after_dense(config: Mapping[str, Any], layer: int) -> bool:
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return layer < len(kinds) and kinds[layer] == "sparse"
    return (
        layer >= (integer(config, "first_k_dense_replace") or 0)
        and layer % (integer(config, "moe_layer_freq") or 1) == 0
    )


def _nemotron(config: Mapping[str, Any], layer: int) -> bool:
    kinds = config.get("layers_block_type") or config.get("hybrid_override_pattern") or ()
    return layer < len(kinds) and kinds[layer] in ("moe", "E")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Layout and spelling of one family.

    Attributes:
        name: ``model_type``.
        root: first name part, live and on the Hub.
        block: part that holds the experts, live and on the Hub.
        projections: gate, up and down of one expert on the Hub; gate is None where there is none.
        transposed: live 3-D tensors are ``[E, in, out]``.
        interleaved: gate and up rows alternate in the fused tensor.
        has_bias: experts have biases.
        disk_transposed: how a fused file is stored; ``either`` means that the sizes in the config tell.
        num_experts: config keys of the number of experts, first found counts.
        hidden: config keys of an expert's row length.
        intermediate: config keys of an expert's inner length.
        is_moe: ``(config, layer)`` -> the layer has routed experts.
    """

    name: str
    root: tuple[str, str] = ("model", "model")
    block: tuple[str, str] = ("mlp", "mlp")
    projections: tuple[str | None, str, str] = ("gate_proj", "up_proj", "down_proj")
    transposed: bool = False
    interleaved: bool = False
    has_bias: bool = False
    disk_transposed: str = "as live"
    num_experts: tuple[str, ...] = ("num_experts", "num_local_experts")
    hidden: tuple[str, ...] = ("hidden_size",)
    intermediate: tuple[str, ...] = ("moe_intermediate_size",)
    is_moe: Callable[[Mapping[str, Any], int], bool] = _every

    @property
    def gated(self) -> bool:
        """Has a gate projection."""
        return self.projections[0] is not None


_MIXTRAL = {
    "block": ("mlp", "block_sparse_moe"),
    "projections": ("w1", "w3", "w2"),
    "num_experts": ("num_local_experts", "num_experts"),
    "intermediate": ("intermediate_size",),
}
_DEEPSEEK = {"num_experts": ("n_routed_experts", "num_local_experts", "num_experts"), "is_moe": _after_dense}


def _table() -> dict[str, Family]:
    rows: dict[str, dict[str, Any]] = {
        "qwen2_moe": {"is_moe": _sparse_step},
        "qwen3_moe": {"is_moe": _sparse_step},
        "qwen3_next": {"is_moe": _sparse_step},
        "qwen3_5_moe": {},
        "qwen3_5_moe_text": {},
        "qwen3_vl_moe": {"is_moe": _sparse_step, "disk_transposed": "either"},
        "olmoe": {"intermediate": ("intermediate_size",)},
        "mixtral": _MIXTRAL,
        "minimax": _MIXTRAL,
        "minimax_m2": _MIXTRAL,
        "deepseek_v2": _DEEPSEEK,
        "deepseek_v3": _DEEPSEEK,
        "kimi_k2": _DEEPSEEK,
        "dots1": _DEEPSEEK,
        "glm4_moe": _DEEPSEEK,
        "glm4_moe_lite": _DEEPSEEK,
        "glm4v_moe": _DEEPSEEK,
        "gpt_oss": {
            "transposed": True,
            "interleaved": True,
            "has_bias": True,
            "num_experts": ("num_local_experts", "num_experts"),
            "intermediate": ("intermediate_size",),
        },
        "nemotron_h": {
            "root": ("model", "backbone"),
            "block": ("mixer", "mixer"),
            "projections": (None, "up_proj", "down_proj"),
            "num_experts": ("n_routed_experts", "num_local_experts"),
            "hidden": ("moe_latent_size", "hidden_size"),
            "is_moe": _nemotron,
        },
    }
    return {name: Family(name=name, **row) for name, row in rows.items()}


#: model_type -> family
FAMILIES: Mapping[str, Family] = _table()

#: A ``ModuleList`` of MLPs made of ``nn.Linear`` (remote code): names and orientation are what the modules themselves say.
MODULE_LIST = Family(name="module_list", num_experts=())
