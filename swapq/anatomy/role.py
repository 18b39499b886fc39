"""What a tensor is in a model. A role is the only thing a recipe can name; what may never be quantized is decided here."""

from enum import StrEnum

__all__ = ["ALWAYS_KEPT", "NEVER_QUANTIZED", "NEXT_TOKEN", "QUANTIZABLE", "TOWER", "UNTOUCHED", "Role"]


class Role(StrEnum):
    """What a tensor is in a model."""

    routed_experts = "routed_experts"
    shared_experts = "shared_experts"
    dense_mlp = "dense_mlp"
    attention = "attention"
    router = "router"
    embedding = "embedding"
    lm_head = "lm_head"
    norm = "norm"
    other = "other"


#: Roles a recipe may give a format to.
QUANTIZABLE = (Role.attention, Role.dense_mlp, Role.routed_experts, Role.shared_experts)

#: Roles that no recipe may name, with the reason.
NEVER_QUANTIZED = {
    Role.router: "a router picks experts by small differences of its logits, and it is a tiny part of the bytes",
    Role.embedding: "an embedding is a table of rows, not a product, so low precision saves no time and costs accuracy",
    Role.lm_head: "the lm_head makes the log-probabilities that both sides of RL must agree on",
    Role.norm: "a norm is a vector",
    Role.other: "nothing is known about these tensors that would make it safe",
}

NEXT_TOKEN = "next-token layer"
TOWER = "vision tower"
#: Parts of a model that stay as they are in every recipe, by ``TensorInfo.note``.
UNTOUCHED = {
    NEXT_TOKEN: "next-token (MTP) layer: stays as it is in every recipe",
    TOWER: "vision or audio tower: stays as it is in every recipe",
}

#: Linears that stay in BF16 in every recipe though their role is quantized: projection name -> ``TensorInfo.note``.
ALWAYS_KEPT = {
    "kv_b_proj": "MLA kv_b_proj",
    "in_proj_ba": "linear-attention gate",
    "in_proj_a": "linear-attention gate",
    "in_proj_b": "linear-attention gate",
}
