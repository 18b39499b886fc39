"""A model as remote code writes them: a ModuleList of experts made of nn.Linear, and a Python loop over it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tests.helpers.models import qwen3_moe


class ListedMLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ListedMoe(nn.Module):
    def __init__(self, hidden: int, inner: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(ListedMLP(hidden, inner) for _ in range(experts))
        self.top_k = top_k

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, index = self.gate(rows).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            row, slot = (index == e).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(rows[row]) * weights[row, slot, None])
        return out.reshape(x.shape)


def listed_experts(experts: int = 4) -> PreTrainedModel:
    """A two-layer model of a family nobody knows, with linear experts."""
    model = qwen3_moe()
    model.config.model_type = "listed_moe"
    torch.manual_seed(3)
    for layer in model.model.layers:
        layer.mlp = ListedMoe(64, 32, experts, 2)
    with torch.no_grad():
        for p in model.model.layers.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.08)
    return model.eval()
