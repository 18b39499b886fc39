"""Reading dotted tensor names: role, layer, expert and projection. Closed tables of exact parts, never substrings.

A projection whose name is not in the tables gets no ``linear`` flag, so no format ever applies to it.
"""

from dataclasses import dataclass

from swapq.anatomy.family import Family
from swapq.anatomy.role import ALWAYS_KEPT, NEXT_TOKEN, TOWER, Role

__all__ = [
    "FUSED_GROUPS",
    "ROW_PARALLEL",
    "NameFacts",
    "hub_spelling",
    "is_expertish",
    "live_spelling",
    "read_name",
    "role_of",
]

_LAYERS = frozenset({"layers", "blocks", "h", "block"})
_TOWERS = frozenset(
    {
        *(
            "visual",
            "vision_tower",
            "vision_model",
            "vision_encoder",
            "vision",
            "image_tower",
            "video_tower",
            "vit",
            "sam_model",
        ),
        *("audio_tower", "audio_model", "audio_encoder", "audio", "speech_encoder", "talker", "token2wav", "code2wav"),
        *(
            "multi_modal_projector",
            "mm_projector",
            "mm_projectors",
            "projector",
            "vision_projector",
            "visual_projector",
        ),
    }
)
_SHARED = frozenset({"shared_expert", "shared_experts", "shared_mlp", "share_expert"})
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "e_score_correction_bias", "expert_bias"})
_ATTENTION = frozenset({"self_attn", "self_attention", "attention", "attn", "linear_attn", "cross_attn"})
_MLPS = frozenset({"mlp", "feed_forward", "ffn", "block_sparse_moe", "moe"})
_EMBEDDINGS = frozenset(
    {"embed_tokens", "embeddings", "word_embeddings", "tok_embeddings", "wte", "wpe", "embed_positions"}
)
_HEADS = frozenset({"lm_head", "embed_out", "head"})

_ATTENTION_LINEARS = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj", "output_gate", "g_proj"),
        *(
            "to_q",
            "to_k",
            "to_v",
            "to_out",
            "wq",
            "wk",
            "wv",
            "wo",
            "query",
            "key",
            "value",
            "query_key_value",
            "dense",
        ),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
        *("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    }
)
_MLP_LINEARS = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "fc1", "fc2"})

#: Projections of one parent that an engine builds as one layer: all get one format or none.
FUSED_GROUPS: tuple[frozenset[str], ...] = (
    frozenset({"q_proj", "k_proj", "v_proj"}),
    frozenset({"to_q", "to_k", "to_v"}),
    frozenset({"wq", "wk", "wv"}),
    frozenset({"query", "key", "value"}),
    frozenset({"gate_proj", "up_proj"}),
    frozenset({"w1", "w3"}),
    frozenset({"q_a_proj", "kv_a_proj_with_mqa"}),
    frozenset({"in_proj_qkv", "in_proj_z"}),
)

#: Projections whose contraction axis tensor parallelism cuts.
ROW_PARALLEL = frozenset({"o_proj", "out_proj", "to_out", "wo", "dense", "down_proj", "w2", "fc2"})

_SCALES = frozenset(
    {
        *(
            "weight_scale",
            "weight_scale_2",
            "weight_scale_inv",
            "input_scale",
            "weight_global_scale",
            "input_global_scale",
        ),
        *(
            "scales",
            "qzeros",
            "g_idx",
            "weight_shape",
            "weight_zero_point",
            "k_scale",
            "v_scale",
            "absmax",
            "quant_map",
        ),
    }
)
#: parts that DDP, FSDP1, activation checkpointing and compile put into names
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
#: roles do not depend on the family
_ANY = Family(name="any")
_FUSED_EXPERTS = {"gate_up_proj": "gate_up", "up_proj": "up", "down_proj": "down"}


@dataclass(frozen=True, slots=True)
class NameFacts:
    """What a name says. ``owner`` is the part that owns the tensor (``q_proj``); ``prefix`` ends in ``experts`` for routed experts."""

    role: Role
    layer: int | None
    note: str
    owner: str
    leaf: str
    prefix: str = ""
    expert: int | None = None
    projection: str = ""
    linear: bool = False


def read_name(name: str, family: Family, num_layers: int | None) -> NameFacts:
    """Role, layer, note and place of a tensor by its name.

    ``num_layers``: decoder layers; a higher index is a next-token layer. None where it is not known yet.
    """
    parts = name.split(".")
    leaf, owner = parts[-1], parts[-2] if len(parts) > 1 else parts[-1]
    scale = _scaled(leaf)
    if any(part in _TOWERS for part in parts):
        return NameFacts(Role.other, None, TOWER, owner, leaf)
    at = _layer_at(parts)
    layer = int(parts[at + 1]) if at is not None else None
    head, rest = (parts[:at], parts[at + 2 :]) if at is not None else (parts[:-2], parts[-2:])
    note = ""
    if any(part.startswith("mtp") for part in (head if at is not None else parts)):
        layer, note = None, NEXT_TOKEN
    elif layer is not None and num_layers is not None and layer >= num_layers:
        note = NEXT_TOKEN
    facts = (
        _experts(parts, layer, note, family)
        if "experts" in rest
        else _elsewhere(rest, layer, note, owner, leaf, at is not None)
    )
    if not scale:
        return facts
    return NameFacts(facts.role, layer, scale, owner, leaf, facts.prefix, facts.expert, facts.projection)


def role_of(name: str) -> Role:
    """Role of a tensor by its name alone, of any family."""
    return read_name(name, _ANY, None).role


def _layer_at(parts: list[str]) -> int | None:
    for i in range(len(parts) - 1):
        if parts[i] in _LAYERS and parts[i + 1].isdecimal():
            return i
    return None


def _experts(parts: list[str], layer: int | None, note: str, family: Family) -> NameFacts:
    at = parts.index("experts")
    prefix, tail, leaf = ".".join(parts[: at + 1]), parts[at + 1 :], parts[-1]
    if leaf == "e_score_correction_bias":
        return NameFacts(Role.router, layer, note or "correction bias", "experts", leaf)
    expert: int | None = None
    owner, projection, linear = "", "", False
    if tail and tail[0].isdecimal():
        expert = int(tail[0])
        if len(tail) == 3:
            owner = tail[1]
            projection = dict(zip(family.projections, ("gate", "up", "down"), strict=True)).get(owner, "")
            linear = leaf == "weight"
    elif len(tail) == 1:
        owner = leaf.removesuffix("_bias")
        projection, linear = _FUSED_EXPERTS.get(owner, ""), not leaf.endswith("_bias")
    linear = linear and bool(projection)
    return NameFacts(Role.routed_experts, layer, note, owner, leaf, prefix, expert, projection, linear)


def _elsewhere(rest: list[str], layer: int | None, note: str, owner: str, leaf: str, inside: bool) -> NameFacts:
    named = owner if leaf in ("weight", "bias") or _scaled(leaf) else leaf
    places = rest[:-1]
    if named == "e_score_correction_bias" or named == "expert_bias":
        return NameFacts(Role.router, layer, note or "correction bias", owner, leaf)
    if "norm" in named.lower() or named.startswith("ln_"):
        return NameFacts(Role.norm, layer, note, owner, leaf)
    if named in _EMBEDDINGS:
        return NameFacts(Role.embedding, layer, note, owner, leaf)
    if named in _HEADS:
        return NameFacts(Role.lm_head, layer, note, owner, leaf)
    if not inside:
        return NameFacts(Role.other, layer, note, owner, leaf)
    if any(part in _ROUTERS for part in places):
        return NameFacts(Role.router, layer, note, owner, leaf)
    role, known = _place(places, owner)
    linear = leaf == "weight" and owner in known
    if linear and not note:
        note = ALWAYS_KEPT.get(owner, "")
    return NameFacts(role, layer, note, owner, leaf, linear=linear)


def _place(places: list[str], owner: str) -> tuple[Role, frozenset[str]]:
    if any(part in _SHARED for part in places):
        return Role.shared_experts, _MLP_LINEARS
    if any(part in _ATTENTION for part in places):
        return Role.attention, _ATTENTION_LINEARS
    if any(part in _MLPS for part in places):
        return Role.dense_mlp, _MLP_LINEARS
    if "mixer" in places and owner in ("q_proj", "k_proj", "v_proj", "o_proj"):
        return Role.attention, _ATTENTION_LINEARS
    if "mixer" in places and owner in ("gate_proj", "up_proj", "down_proj"):
        return Role.dense_mlp, _MLP_LINEARS
    return Role.other, frozenset()


def _scaled(leaf: str) -> str:
    fused = leaf.endswith(("_scale_inv", "_scale", "_scales", "_blocks", "_scale_2"))
    return "scale of a quantized weight" if leaf in _SCALES or fused else ""


def is_expertish(name: str) -> bool:
    """Whether a name speaks of experts in a spelling that no table knows: such a model is an MoE of an unknown layout."""
    known = _SHARED | {"experts", "shared_expert_gate", "expert_bias"}
    return any("expert" in part and part not in known for part in name.split("."))


def hub_spelling(name: str, family: Family | None) -> str:
    """A live name as the Hub spells it, parts that wrappers add left out; names that are already so stay."""
    name = _unwrapped(name)
    return name if family is None else _respell(name, family.root, family.block)


def live_spelling(name: str, family: Family | None) -> str:
    """A name of the Hub as a live model spells it; names that are already so stay."""
    return name if family is None else _respell(name, family.root[::-1], family.block[::-1])


def _unwrapped(name: str) -> str:
    name = name.removeprefix("module.")
    if "_wrapped_module." in name or "_orig_mod." in name:
        return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    return name


def _respell(name: str, root: tuple[str, str], block: tuple[str, str]) -> str:
    if root[0] == root[1] and block[0] == block[1]:
        return name
    parts = name.split(".")
    if parts[0] == root[0]:
        parts[0] = root[1]
    at = _layer_at(parts)
    if (
        at is not None
        and at + 2 < len(parts)
        and parts[at + 2] == block[0]
        and not any(part in _TOWERS for part in parts)
    ):
        parts[at + 2] = block[1]
    return ".".join(parts)
