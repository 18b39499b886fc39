"""Tiny models of every family that transformers has, and header-only checkpoints for what it has not."""

import contextlib
import io
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

LAYERS, EXPERTS, HIDDEN, INNER = 2, 4, 64, 32

_BASE = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_WIDE = {**_BASE, "intermediate_size": INNER}
_MLA = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
_DEEP = {**_BASE, "n_routed_experts": EXPERTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_NEMOTRON = {
    **{
        k: v for k, v in _BASE.items() if k not in ("num_hidden_layers", "bos_token_id", "eos_token_id", "pad_token_id")
    },
    "layers_block_type": ["mamba", "attention", "moe", "mlp"],
    "n_routed_experts": EXPERTS,
    "n_groups": 2,
    "moe_shared_expert_intermediate_size": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
}

#: model_type -> config of a tiny model; names after a slash are variants
TINY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_BASE, "num_experts": EXPERTS},
    "qwen2_moe": {**_BASE, "num_experts": EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_next": {**_BASE, **_LINEAR, "num_experts": EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_5_moe_text": {**_BASE, **_LINEAR, "num_experts": EXPERTS, "shared_expert_intermediate_size": 32},
    "mixtral": {**_WIDE, "num_local_experts": EXPERTS},
    "olmoe": {**_WIDE, "num_experts": EXPERTS},
    "minimax": {**_WIDE, "num_local_experts": EXPERTS},
    "minimax_m2": {**_WIDE, "num_local_experts": EXPERTS},
    "deepseek_v2": {**_DEEP, **_MLA},
    "deepseek_v3": {**_DEEP, **_MLA},
    "glm4_moe": _DEEP,
    "glm4_moe_lite": {**_DEEP, **_MLA, "mlp_layer_types": ["dense", "sparse"]},
    "dots1": {**_DEEP, "n_shared_experts": 1, "layer_types": ["full_attention", "full_attention"]},
    "gpt_oss": {**_WIDE, "num_local_experts": EXPERTS},
    "nemotron_h": _NEMOTRON,
    "nemotron_h/latent": {**_NEMOTRON, "moe_latent_size": 32},
}
#: families whose language model sits inside a vision-language model
TINY_VISION = ("qwen3_5_moe", "qwen3_vl_moe", "glm4v_moe")


def tiny(name: str, *, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> nn.Module:
    """A tiny model with random weights."""
    kind = name.partition("/")[0]
    if kind in TINY_VISION:
        return _tiny_vision(kind, dtype)
    config = AutoConfig.for_model(kind, **{**TINY.get(name, _BASE), **changes})
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _tiny_vision(kind: str, dtype: torch.dtype) -> nn.Module:
    config = AutoConfig.for_model(kind)
    # hidden differs from both 32 and 64, so that the orientation of fused files shows
    text = {
        **_DEEP,
        **_LINEAR,
        "num_experts": EXPERTS,
        "shared_expert_intermediate_size": 32,
        "hidden_size": 96,
        "vocab_size": 300,
    }
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 96}
    vision["deepstack_visual_indexes"] = [0]  # type: ignore[assignment]
    for part, values in ((config.text_config, text), (config.vision_config, vision)):
        for key, value in values.items():
            if hasattr(part, key):
                setattr(part, key, value)
    return AutoModelForImageTextToText.from_config(config, dtype=dtype)


def save(model: nn.Module, directory: Path, **kwargs: Any) -> Path:
    """``save_pretrained`` without its progress bar: the Hub's names, by transformers' own reverse mapping."""
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(directory, **kwargs)  # type: ignore[operator]
    return directory


_SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "U8": 1, "I8": 1, "I32": 4}


def write_shard(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """A safetensors file with a true header and a hole instead of data."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * _SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + at)


def write_folder(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]], *, shards: int = 1
) -> Path:
    """A checkpoint folder of headers, with an index where there is more than one shard."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_shard(directory / "model.safetensors", tensors)
        return directory
    names, weight_map = list(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        write_shard(directory / file, {name: tensors[name] for name in mine})
        weight_map.update(dict.fromkeys(mine, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def qwen_headers(
    *, layers: int = 2, experts: int = 4, hidden: int = 64, inner: int = 32, dtype: str = "BF16", prefix: str = "model"
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Headers of a Qwen3-MoE checkpoint."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {f"{prefix}.embed_tokens.weight": (dtype, (128, hidden))}
    for i in range(layers):
        stem = f"{prefix}.layers.{i}"
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{stem}.self_attn.{part}.weight"] = (dtype, (64, hidden) if part != "o_proj" else (hidden, 64))
        tensors[f"{stem}.input_layernorm.weight"] = (dtype, (hidden,))
        tensors[f"{stem}.mlp.gate.weight"] = (dtype, (experts, hidden))
        for e in range(experts):
            for part in ("gate_proj", "up_proj", "down_proj"):
                shape = (hidden, inner) if part == "down_proj" else (inner, hidden)
                tensors[f"{stem}.mlp.experts.{e}.{part}.weight"] = (dtype, shape)
    tensors["lm_head.weight"] = (dtype, (128, hidden))
    return tensors


def qwen_config(**changes: Any) -> dict[str, Any]:
    """The config that goes with :func:`qwen_headers`."""
    base = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "num_experts": 4,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
    }
    return {**base, **changes}


class Expert(nn.Module):
    """A remote-code MLP of linears."""

    def __init__(self, hidden: int, inner: int, names: tuple[str, ...], bias: bool) -> None:
        super().__init__()
        for name in names[:-1]:
            self.add_module(name, nn.Linear(hidden, inner, bias=bias))
        self.add_module(names[-1], nn.Linear(inner, hidden, bias=bias))


class RemoteModel(nn.Module):
    """What remote code looks like: a ``ModuleList`` of per-expert MLPs under ``layers.N.mlp.experts``."""

    def __init__(
        self,
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
        *,
        config: Mapping[str, Any] | None = None,
        bias: bool = False,
        hidden: int = 64,
        inner: int = 32,
    ) -> None:
        super().__init__()
        self.config = (
            {"model_type": "somebodys_moe", "num_hidden_layers": 2, "num_experts": 4} if config is None else config
        )
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(16, hidden)
        self.model.layers = nn.ModuleList()
        for _ in range(2):
            layer, mlp = nn.Module(), nn.Module()
            mlp.gate = nn.Linear(hidden, 4, bias=False)
            mlp.experts = nn.ModuleList(Expert(hidden, inner, names, bias) for _ in range(4))
            layer.mlp = mlp
            self.model.layers.append(layer)
